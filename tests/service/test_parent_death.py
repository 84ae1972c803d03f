"""No process of ours outlives its daemon: shown with real process trees made by multiprocessing's spawn method."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd.parent_death import PARENT_VARIABLE, ProcessIdentity, open_pidfd

TIMEOUT_SECONDS = 30

# A daemon as ours is laid out: the hook is the first thing its main module does. The child makes a grand-child, as
# vLLM's engine process makes its worker; both report their pids and heed no SIGTERM.
DAEMON = """
import os
from refitd import parent_death
parent_death.install_from_environment()
import multiprocessing, signal, time

def live(report, depth):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if depth:
        start(report, depth - 1)
    report.put(os.getpid())
    time.sleep(600)

def start(report, depth):
    multiprocessing.get_context("spawn").Process(target=live, args=(report, depth)).start()

if __name__ == "__main__":
    parent_death.export(os.environ)
    report = multiprocessing.get_context("spawn").SimpleQueue()
    start(report, depth=1)
    print(report.get(), report.get(), flush=True)
    time.sleep(600)
"""


class Family:
    """A daemon, its child and its grand-child, each by a pidfd."""

    def __init__(self, script: Path) -> None:
        self.daemon = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
        assert self.daemon.stdout is not None
        first, second = map(int, self.daemon.stdout.readline().split())
        self.child, self.grandchild = (first, second) if parent_of(second) == first else (second, first)
        self.pidfds = {pid: os.pidfd_open(pid) for pid in (self.child, self.grandchild)}

    def ends(self, pid: int) -> bool:
        """Waits for this process to end."""
        return bool(select.select([self.pidfds[pid]], [], [], TIMEOUT_SECONDS)[0])

    def close(self) -> None:
        for pidfd in self.pidfds.values():
            if not select.select([pidfd], [], [], 0)[0]:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self.daemon.kill()
        self.daemon.communicate()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    script = tmp_path / "daemon.py"
    script.write_text(DAEMON)
    family = Family(script)
    yield family
    family.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_children_and_grandchildren_die_with_the_daemon(family: Family) -> None:
    """SIGKILL of the daemon, which runs no handler, takes the whole tree along."""
    family.daemon.kill()
    assert family.ends(family.child)
    assert family.ends(family.grandchild)


def test_an_unhandled_sigterm_is_no_different(family: Family) -> None:
    """A daemon that SIGTERM ends before it could install a handler leaves nothing either."""
    family.daemon.terminate()
    assert family.ends(family.child)
    assert family.ends(family.grandchild)


def test_stopped_processes_die_too(family: Family) -> None:
    """A child that is stopped runs no thread of its own that could notice; the kernel ends it all the same."""
    os.kill(family.child, signal.SIGSTOP)
    os.kill(family.grandchild, signal.SIGSTOP)
    family.daemon.kill()
    assert family.ends(family.child)
    assert family.ends(family.grandchild)


def test_grandchildren_die_with_their_own_parent(family: Family) -> None:
    """Killing the engine process takes its worker along while the daemon lives on to report it."""
    os.kill(family.child, signal.SIGKILL)
    assert family.ends(family.grandchild)
    assert family.daemon.poll() is None


def started_under(parent: str) -> int:
    """The exit status of a child that is told to belong to `parent` and then would end well."""
    code = "from refitd import parent_death; parent_death.install_from_environment()"
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, PARENT_VARIABLE: parent}).returncode


def test_a_child_that_starts_too_late_ends_at_once() -> None:
    """The daemon died between making the child and the child's first line: nothing will ever signal that again."""
    gone = subprocess.Popen(["sleep", "600"])
    identity = ProcessIdentity.of(gone.pid)
    gone.kill()
    gone.wait()
    assert started_under(str(identity)) == -signal.SIGKILL


def test_a_reused_pid_is_not_the_daemon() -> None:
    """A living process with the daemon's pid but another start time means that the daemon is gone."""
    here = ProcessIdentity.of(os.getpid())
    assert started_under(str(ProcessIdentity(here.pid, here.start_ticks - 1))) == -signal.SIGKILL
    assert started_under(str(here)) == 0


def test_a_garbled_variable_is_an_error() -> None:
    """A value that names no process is our own bug: the child fails loudly instead of living on unwatched."""
    assert started_under("somebody") == 1


def test_a_zombie_has_ended() -> None:
    """A process that is dead but not yet reaped holds nothing and is not alive."""
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(zombie.pid)
    zombie.wait()


def test_a_name_cannot_forge_the_start_time(tmp_path: Path) -> None:
    """/proc/PID/stat holds the process's name unescaped, and a name may look like the fields after it."""
    executable = tmp_path / "a) Z (b"
    shutil.copy("/bin/sleep", executable)
    process = subprocess.Popen([str(executable), "600"])
    try:
        pidfd = open_pidfd(ProcessIdentity.of(process.pid))
        assert pidfd is not None
        os.close(pidfd)
    finally:
        process.kill()
        process.wait()


def test_identity_survives_its_text() -> None:
    """What is written into the environment or a file is read back as the same process."""
    here = ProcessIdentity.of(os.getpid())
    assert ProcessIdentity.parse(str(here)) == here
