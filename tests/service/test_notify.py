"""What a supervisor receives, read from a real datagram socket as systemd does."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd.notify import Notifier, extending


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(60)
        yield receiver


@pytest.fixture
def notifier(supervisor: socket.socket) -> Iterator[Notifier]:
    notifier = Notifier({"NOTIFY_SOCKET": supervisor.getsockname()})
    yield notifier
    notifier.close()


def received(supervisor: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in supervisor.recv(4096).decode().split("\n"))


def test_ready_names_status_and_main_process(notifier: Notifier, supervisor: socket.socket) -> None:
    """READY comes with the status line and the pid of the daemon itself, in one datagram."""
    notifier.ready("serving qwen3")
    assert received(supervisor) == {"READY": "1", "STATUS": "serving qwen3", "MAINPID": str(os.getpid())}


def test_status_cannot_smuggle_a_second_assignment(notifier: Notifier, supervisor: socket.socket) -> None:
    """A model name with a line break in it stays inside STATUS: sd_notify separates assignments by line breaks."""
    notifier.status("serving evil\nMAINPID=1")
    assert received(supervisor) == {"STATUS": "serving evil MAINPID=1"}


def test_watchdog_stopping_and_reloading(notifier: Notifier, supervisor: socket.socket) -> None:
    """The keep-alive, the stop and the reload are the assignments that sd_notify(3) names."""
    notifier.watchdog()
    assert received(supervisor) == {"WATCHDOG": "1"}
    notifier.stopping("draining")
    assert received(supervisor) == {"STOPPING": "1", "STATUS": "draining"}
    notifier.reloading()
    assert received(supervisor).keys() == {"RELOADING", "MONOTONIC_USEC"}


def test_extend_is_in_microseconds(notifier: Notifier, supervisor: socket.socket) -> None:
    """Seconds of ours become the microseconds of systemd's."""
    notifier.extend(1.5)
    assert received(supervisor) == {"EXTEND_TIMEOUT_USEC": "1500000"}


def test_abstract_address() -> None:
    """An address that begins with @ lives in the abstract namespace."""
    name = f"refitd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name)
        receiver.settimeout(60)
        notifier = Notifier({"NOTIFY_SOCKET": "@" + name})
        notifier.watchdog()
        assert receiver.recv(100) == b"WATCHDOG=1"
        notifier.close()


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}])
def test_without_a_supervisor_nothing_is_sent(environment: dict[str, str]) -> None:
    """In a terminal every call does nothing; an address of another kind is no reason to fail."""
    notifier = Notifier(environment)
    notifier.ready("serving")
    notifier.extend(1)
    assert not notifier.supervised


def test_a_supervisor_that_went_away_is_no_error(notifier: Notifier, supervisor: socket.socket) -> None:
    """The daemon outlives its notification socket."""
    supervisor.close()
    notifier.watchdog()
    notifier.status("still here")


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": str(os.getpid())}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_watchdog_interval(environment: dict[str, str], seconds: float | None) -> None:
    """The interval is ours only if systemd means this very process by it."""
    assert Notifier(environment).watchdog_seconds == seconds


def test_extending_repeats_while_the_work_lasts(notifier: Notifier, supervisor: socket.socket) -> None:
    """A load that blocks its thread is kept alive by another one, and the extensions end with it."""
    with extending(notifier, period_seconds=0.01, limit_seconds=60):
        extensions = [received(supervisor) for _ in range(3)]
    assert extensions == [{"EXTEND_TIMEOUT_USEC": "20000"}] * 3
    assert "extend-timeout" not in {thread.name for thread in threading.enumerate()}


def test_extending_ends_at_its_limit(notifier: Notifier, supervisor: socket.socket) -> None:
    """What hangs for ever is not kept alive for ever: after the limit the thread is gone though the work goes on."""
    with extending(notifier, period_seconds=0.01, limit_seconds=0.05):
        [thread] = [thread for thread in threading.enumerate() if thread.name == "extend-timeout"]
        thread.join(timeout=30)
        assert not thread.is_alive()
