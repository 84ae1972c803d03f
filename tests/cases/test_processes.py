"""Case J: no process of an engine outlives its daemon, whichever way it was started and whenever it dies."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from tests.daemon_process import START_SECONDS, DaemonProcess, start_daemon
from tests.waiting import until

END_MILLISECONDS = 30_000


def first_children(daemon: DaemonProcess) -> list[int]:
    """Pidfds of the first processes of an engine that is starting."""

    def opened() -> list[int]:
        assert daemon.process.poll() is None, daemon.log.read_text()[-2000:]
        return [pidfd for pid in daemon.engine_pids() for pidfd in pidfd_of(pid)]

    return until(opened, "the first process of the engine", START_SECONDS)


def pidfd_of(pid: int) -> list[int]:
    """None of a process that has ended: vLLM runs some that only tell it what the machine is like."""
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        return []


def test_children_end_with_a_daemon_killed_during_its_start(model_path: Path, short_directory: Path) -> None:
    """SIGKILL before the model is loaded: the engine's processes, which no signal handler of ours serves, end too."""
    daemon = start_daemon(model_path, short_directory / "killed-at-start")
    try:
        children = first_children(daemon)
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
        for pidfd in children:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            assert poller.poll(END_MILLISECONDS), "a process of the engine outlived its daemon"
            os.close(pidfd)
    finally:
        daemon.stop()
