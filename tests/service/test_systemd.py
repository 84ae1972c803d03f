"""The service under a real systemd: start, status, reload, deaths of every kind, watchdog, stop, no pointless restarts.

The tests of one running engine stand in an order that needs few starts, but each makes its own starting point.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.service.booted import PATIENT_LOOK_SECONDS, BootedSystemd
from tests.service.client import STREAMS
from tests.service.conftest import CONFIGURATION, Service, configure

pytestmark = [pytest.mark.systemd, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def running(service: Service) -> Service:
    """The service with its engine up, whatever the test before did to it."""
    service.start()
    return service


@pytest.fixture
def idle(idle_service: Service) -> Service:
    idle_service.start()
    return idle_service


# --- no engine needed -------------------------------------------------------------------------------------------------


def test_a_deferred_load_is_ready_at_once_and_stays(idle: Service) -> None:
    """Without a model it answers status, and the watchdog, which is short here, leaves it alone."""
    status = client_status(idle)
    assert status["state"] == "unloaded"
    pid = idle.main_pid
    before = float(idle.show("WatchdogTimestampMonotonic"))
    idle.wait_for(lambda: float(idle.show("WatchdogTimestampMonotonic")) > before, "the watchdog to be fed twice")
    assert idle.main_pid == pid


def test_a_daemon_that_hangs_is_replaced(idle: Service) -> None:
    """SIGSTOP of the daemon itself: nothing feeds the watchdog, systemd ends it and starts another."""
    pid = idle.main_pid
    idle.signal(idle.processes()[0], "STOP")
    idle.wait_until_active_again(pid)
    assert "Watchdog timeout" in idle.journal()


def test_reload_takes_over_what_can_change(idle: Service, systemd: BootedSystemd) -> None:
    """`systemctl reload` keeps the process and its socket; a file with a mistake in it changes nothing and is named."""
    pid = idle.main_pid
    good = idle_configuration(idle)
    configure(systemd, "idle", f'{good}\n[log]\nlevel = "debug"\n')
    idle.systemd.systemctl("reload", idle.unit)
    idle.wait_for(lambda: "configuration reloaded" in idle.journal(), "the reload to be logged")
    configure(systemd, "idle", f"{good}\n[log]\nlevl = 1\n")
    idle.systemd.systemctl("reload", idle.unit)
    idle.wait_for(lambda: "log.levl" in idle.journal(), "the mistake to be named")
    configure(systemd, "idle", good)
    assert idle.is_active()
    assert idle.main_pid == pid
    assert client_status(idle)["state"] == "unloaded"


def test_stopping_an_idle_daemon_is_a_success(idle: Service) -> None:
    """SIGTERM, exit 0, no process, no runtime directory."""
    idle.stop()
    assert (idle.show("Result"), idle.show("ExecMainStatus")) == ("success", "0")
    assert idle.processes() == []
    assert idle.systemd.run("test", "-e", "/run/refitd-idle", check=False).returncode == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('model = "/nonexistent/model"\n', "/nonexistent/model does not exist"),
        ('modle = "x"\n', "modle"),
        ("model = \n", "bad.toml"),
        (CONFIGURATION.format(model="/etc"), "no config.json"),
    ],
)
def test_a_bad_configuration_is_not_tried_again(systemd: BootedSystemd, content: str, named: str) -> None:
    """Exit 2 with one line that names the cause, no READY, no restart, no child."""
    service = Service(systemd, "refitd@bad.service")
    configure(systemd, "bad", content)
    systemd.systemctl("reset-failed", service.unit, check=False)
    assert systemd.systemctl("start", service.unit, check=False).returncode != 0
    assert (service.show("Result"), service.show("ExecMainStatus")) == ("exit-code", "2")
    assert (service.show("ActiveState"), service.show("NRestarts")) == ("failed", "0")
    assert service.processes() == []
    [line] = [line for line in service.journal().splitlines() if named in line]
    assert "Traceback" not in line


def test_a_machine_that_is_too_full_is_given_up_after_a_few_starts(systemd: BootedSystemd, model_path: Path) -> None:
    """Exit 3 with one line each time, no READY, no child: somebody may make room, but it is not tried for ever."""
    service = Service(systemd, "refitd@full.service")
    content = CONFIGURATION.format(model=model_path)
    configure(systemd, "full", content.replace("cpu_kv_cache_gib = 1", "cpu_kv_cache_gib = 1000000"))
    assert systemd.systemctl("start", service.unit, check=False).returncode != 0
    service.wait_for(lambda: service.show("ActiveState") == "failed", "systemd to give up", PATIENT_LOOK_SECONDS)
    assert service.show("ExecMainStatus") == "3"
    assert service.processes() == []
    journal = service.journal()
    assert journal.count("lower engine.cpu_kv_cache_gib") == int(service.show("NRestarts")) == 5
    assert "Traceback" not in journal


# --- with a real engine -----------------------------------------------------------------------------------------------


def test_ready_means_servable_inside_the_sandbox(running: Service) -> None:
    """Once `systemctl start` returns, a trainer beside the service refits from its own memory and gets tokens back."""
    assert client_status(running)["state"] == "ready"
    worked = subprocess.run(running.client("work"), capture_output=True, text=True)
    assert worked.stdout.strip().splitlines()[-1:] == ["1 8 1"], worked.stderr + running.journal()


def test_status_says_what_is_served(running: Service) -> None:
    """`systemctl status` shows model, state, version and requests; the journal has JSON lines with priorities."""
    running.wait_for(lambda: "ready" in running.show("StatusText"), "the status text")
    text = running.show("StatusText")
    assert "model" in text
    assert "version" in text
    assert "running" in text
    lines = running.systemd.journal("-u", running.unit, "-p", "info", "--grep", "model loaded").splitlines()
    assert json.loads(lines[-1])["event"] == "model loaded"


def test_stop_with_work_in_flight(running: Service) -> None:
    """New work is refused, each output that outlasts the drain is ended by name, the exit is clean and in time."""
    client = started_client(running, "stream")
    try:
        running.systemd.systemctl("stop", "--no-block", running.unit)
        running.wait_for_drain()
        said, _ = client.communicate("\n", timeout=60)
    finally:
        client.kill()
        client.wait()
    refused, ends = said.splitlines()
    assert refused == "refused draining"
    counts = json.loads(ends)
    assert sum(counts.values()) == STREAMS
    assert "cancelled draining" in counts
    assert set(counts) <= {"cancelled draining", "length None"}
    running.wait_for(lambda: running.show("ActiveState") == "inactive", "the stop")
    assert (running.show("Result"), running.show("ExecMainStatus")) == ("success", "0")
    assert running.processes() == []


def test_a_second_signal_ends_the_drain_whoever_does_not_read(running: Service) -> None:
    """With ten minutes to drain and a client that does not read, all others are told, and it ends at once."""
    settings = running.systemd.run("cat", "/etc/refitd/refitd.toml").stdout
    configure(running.systemd, "refitd", settings.replace("drain_seconds = 3.0", "drain_seconds = 600.0"))
    running.systemd.systemctl("reload", running.unit)
    stalled, client = started_client(running, "stall"), started_client(running, "stream")
    try:
        running.systemd.systemctl("stop", "--no-block", running.unit)
        running.wait_for_drain()
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline().strip() == "refused draining"
        running.systemd.systemctl("kill", "--kill-whom=main", "--signal=TERM", running.unit)
        ends, _ = client.communicate(timeout=60)
    finally:
        configure(running.systemd, "refitd", settings)
        for process in (stalled, client):
            process.kill()
            process.communicate()
    assert sum(json.loads(ends).values()) == STREAMS
    running.wait_for(lambda: running.show("ActiveState") == "inactive", "the stop")
    assert (running.show("Result"), running.show("ExecMainStatus")) == ("success", "0")
    assert running.processes() == []


def started_client(service: Service, what: str) -> subprocess.Popen[str]:
    """Once it has said that its work is under way."""
    client = subprocess.Popen(service.client(what), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline().strip() == "started"
    return client


def test_a_killed_daemon_leaves_nothing_and_comes_back(running: Service) -> None:
    """SIGKILL of the daemon: its engine is gone before the next one starts, which gets ready by itself."""
    pid, (daemon, *engine) = running.main_pid, running.processes()
    assert engine, "the engine runs in processes of its own"
    running.signal(daemon, "KILL")
    running.wait_for_restart(pid)
    assert not set(running.processes()) & {daemon, *engine}
    running.wait_until_active()
    assert client_status(running)["state"] == "ready"


def test_a_silent_engine_is_replaced(running: Service) -> None:
    """SIGSTOP of the engine process: the liveness call gets no answer, and the daemon gives up with exit 4."""
    pid, restarts = running.main_pid, int(running.show("NRestarts"))
    _, *engine = running.processes()
    for process in engine:
        running.signal(process, "STOP")
    running.wait_until_active_again(pid)
    assert not set(running.processes()) & set(engine)
    assert int(running.show("NRestarts")) == restarts + 1
    assert "status=4" in running.journal()


def test_a_killed_engine_is_replaced_and_a_load_can_be_stopped(running: Service) -> None:
    """SIGKILL of the engine process ends the daemon with exit 4; `stop` during the next load leaves no process."""
    pid, (_, *engine) = running.main_pid, running.processes()
    # multiprocessing's resource tracker is among them too, in any order.
    core = next(process for process in engine if "VLLM" in Path(f"/proc/{process}/comm").read_text())
    running.signal(core, "KILL")
    running.wait_for_restart(pid)
    assert not set(running.processes()) & set(engine)
    assert running.show("ActiveState") == "activating"
    running.wait_for(lambda: len(running.processes()) > 1, "the load to have made processes")
    running.stop()
    assert running.show("Result") == "success"
    assert running.processes() == []


def client_status(service: Service) -> dict[str, object]:
    """What the daemon says to a client beside it."""
    endpoint = f"ipc:///run/{service.unit.removesuffix('.service').replace('@', '-')}/refitd.sock"
    command = service.client("status")
    command.insert(command.index("env") + 1, f"REFITD_ENDPOINT={endpoint}")
    asked = subprocess.run(command, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr + service.journal()
    status: dict[str, object] = json.loads(asked.stdout)
    return status


def idle_configuration(idle: Service) -> str:
    return idle.systemd.run("cat", "/etc/refitd/idle.toml").stdout
