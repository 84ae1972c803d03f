"""The daemon's children die with it, however it dies and however deep they are.

The daemon names itself in the environment; every process that re-imports the daemon's main module (each child of
multiprocessing's spawn method does, as `__mp_main__`, before it unpickles its work) calls `install_from_environment`.
Two mechanisms, since neither is enough alone:

- PR_SET_PDEATHSIG is the kernel's, so it also ends a child that is stopped or busy in native code; but it knows only
  the direct parent, and fires when the parent's *thread* that made the child ends: the engine must be made by a thread
  that lives as long as the daemon.
- A thread waiting on a pidfd of the daemon itself covers grand-children, whose direct parent may outlive the daemon.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PARENT_VARIABLE = "REFIT_PARENT"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class ProcessIdentity:
    """A process for good: pids are used again, a pid with its start time (clock ticks since boot) is not."""

    pid: int
    start_ticks: int

    def __str__(self) -> str:
        return f"{self.pid}:{self.start_ticks}"

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity:
        """Raises ValueError for anything that `str` did not make."""
        pid, start_ticks = text.split(":")
        return cls(int(pid), int(start_ticks))

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Raises ProcessLookupError where there is no such process, or only its zombie."""
        state, start_ticks = _state_and_start(pid)
        if state in "ZX":
            raise ProcessLookupError(f"process {pid} has ended")
        return cls(pid, start_ticks)

    def is_alive(self) -> bool:
        try:
            return ProcessIdentity.of(self.pid) == self
        except ProcessLookupError:
            return False


def export(environment: MutableMapping[str, str]) -> None:
    """In the daemon, before it makes the engine: from here on children inherit whom they belong to."""
    environment[PARENT_VARIABLE] = str(ProcessIdentity.of(os.getpid()))


def install_from_environment(environment: Mapping[str, str] = os.environ) -> None:
    """In a child, before anything else: this process ends when the daemon does. No-op in the daemon and elsewhere."""
    if PARENT_VARIABLE not in environment:
        return
    daemon = ProcessIdentity.parse(environment[PARENT_VARIABLE])
    if daemon.pid == os.getpid():
        return
    _ask_kernel_to_follow_parent()
    watched = open_pidfd(daemon)
    # Death before the two lines above leaves no signal behind: whoever comes too late ends at once.
    if watched is None:
        _end_this_process()
    threading.Thread(target=_end_with, args=(watched,), name="parent-death", daemon=True).start()


def open_pidfd(process: ProcessIdentity) -> int | None:
    """A descriptor that becomes readable when the process ends and never means another; None if it has ended."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.is_alive():
        return pidfd
    os.close(pidfd)
    return None


def _ask_kernel_to_follow_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _end_with(pidfd: int) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    _end_this_process()


def _end_this_process() -> NoReturn:
    """SIGKILL, because nothing in a child whose daemon is gone is worth a handler that could hang."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process survived SIGKILL")


def _state_and_start(pid: int) -> tuple[str, int]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    # proc(5): the name in parentheses may hold anything, state and start time are fields 3 and 22.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])
