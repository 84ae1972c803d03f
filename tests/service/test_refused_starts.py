"""Starts that cannot work are refused before a model is loaded: one line, the right exit code, nothing left behind."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from refitd import orphans
from refitd.parent_death import PARENT_VARIABLE, ProcessIdentity

CONFIGURATION, STARTUP = 2, 3


@pytest.fixture
def directory(short_directory: Path) -> Iterator[Path]:
    """A private runtime directory of this test's own."""
    directory = short_directory / "refused"
    directory.mkdir(mode=0o700)
    yield directory
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


Serve = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def serve(directory: Path, model_path: Path) -> Serve:
    """Runs `refitd serve` to its end, which comes soon."""

    def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        endpoint = f"ipc://{directory}/refitd.sock"
        command = [sys.executable, "-m", "refitd", "serve", "--model", str(model_path), "--endpoint", endpoint]
        variables = {**os.environ, "REFITD_RUNTIME_DIRECTORY": str(directory), **environment}
        return subprocess.run([*command, *arguments], env=variables, capture_output=True, text=True, timeout=200)

    return serve


def assert_refused(finished: subprocess.CompletedProcess[str], code: int, named: str) -> None:
    assert finished.returncode == code, finished.stderr
    assert "Traceback" not in finished.stderr
    [line] = finished.stderr.strip().splitlines()
    assert named in line


def test_an_endpoint_in_use(serve: Serve, directory: Path) -> None:
    """The daemon that holds it is named by pid."""
    with (directory / "refitd.sock.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4242\n")
        lock.flush()
        assert_refused(serve(), CONFIGURATION, "4242")


def test_a_file_at_the_endpoint(serve: Serve, directory: Path) -> None:
    """A file of the operator's is not replaced by a socket."""
    (directory / "refitd.sock").write_text("precious")
    assert_refused(serve(), CONFIGURATION, str(directory / "refitd.sock"))
    assert (directory / "refitd.sock").read_text() == "precious"


def test_a_directory_open_to_others(serve: Serve, directory: Path) -> None:
    """Others could put a socket of theirs in the daemon's place."""
    directory.chmod(0o777)
    assert_refused(serve(), CONFIGURATION, "open to others")


def test_a_port_in_use(serve: Serve) -> None:
    """The HTTP port is taken before the model loads, or not at all."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert_refused(serve("--set", "http.enabled=true", "--set", f"http.port={port}"), CONFIGURATION, str(port))


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (("--set", "engine.max_num_seq=4"), {}, "engine.max_num_seq"),
        (("--set", "engine.max_num_seqs=-1"), {}, "engine.max_num_seqs"),
        (("--set", "nonsense"), {}, "nonsense"),
        (("--endpoint", "tcp://0.0.0.0:5555"), {}, "tcp://0.0.0.0:5555"),
        (("--endpoint", f"ipc:///tmp/{'x' * 200}"), {}, "at most 107"),
        (("--config", "/nonexistent/refitd.toml"), {}, "/nonexistent/refitd.toml"),
        ((), {"REFITD_MODLE": "x"}, "REFITD_MODLE"),
    ],
)
def test_a_setting_that_cannot_be(
    serve: Serve, arguments: tuple[str, ...], environment: dict[str, str], named: str
) -> None:
    """The setting is named as it was given, by flag or by variable."""
    assert_refused(serve(*arguments, **environment), CONFIGURATION, named)


def test_sleep_mode_on_a_cpu(serve: Serve) -> None:
    """vLLM would say so after many seconds, and systemd would try again."""
    assert_refused(serve("--set", "engine.enable_sleep_mode=true"), CONFIGURATION, "engine.enable_sleep_mode")


def test_no_model(directory: Path) -> None:
    """All three ways to name one are in the line."""
    command = [sys.executable, "-m", "refitd", "serve"]
    finished = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=200, check=False)
    assert_refused(finished, CONFIGURATION, "--model, as REFITD_MODEL or in the file of --config")


def test_a_model_without_a_tokenizer(serve: Serve, model_path: Path, tmp_path: Path) -> None:
    """Prompts would come to nothing: refused, unless the tokenizer is said to be elsewhere or not wanted."""
    for file in model_path.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    assert_refused(serve("--model", str(tmp_path)), CONFIGURATION, "has no tokenizer")


@pytest.fixture
def orphan(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that an earlier daemon, now dead, made as its engine."""
    daemon = subprocess.Popen(["sleep", "infinity"])
    environment = {**os.environ, PARENT_VARIABLE: str(ProcessIdentity.of(daemon.pid))}
    orphans.mark(environment, directory, [])
    daemon.kill()
    daemon.wait()
    orphan = subprocess.Popen(["sleep", "infinity"], env=environment)
    yield orphan
    orphan.kill()
    orphan.wait()


def test_an_orphan_of_an_earlier_run(serve: Serve, orphan: subprocess.Popen[bytes]) -> None:
    """It is named by pid and left alone: whoever started it may want to look at it."""
    assert_refused(serve(), STARTUP, f"process {orphan.pid} (sleep)")
    assert orphan.poll() is None


def test_replace_ends_the_orphan(serve: Serve, orphan: subprocess.Popen[bytes]) -> None:
    """With --replace it is ended; what then stands in the way is refused as always."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        finished = serve("--replace", "--set", "http.enabled=true", "--set", f"http.port={port}")
    assert finished.returncode == CONFIGURATION
    assert orphan.wait(30) == -9
