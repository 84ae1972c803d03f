"""A real systemd, booted beside the machine's own in fresh namespaces, with only the units that a test gives it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.daemon_process import is_alive
from tests.waiting import until

SYSTEMD = Path("/lib/systemd/systemd")
STOCK_UNITS = Path("/lib/systemd/system")
STOCK = (
    *(f"{name}.target" for name in ("sysinit", "basic", "shutdown", "exit", "final", "umount", "sockets", "timers")),
    *(f"{name}.target" for name in ("paths", "slices", "multi-user", "network", "network-online")),
    "systemd-exit.service",
    "systemd-journald.service",
    "systemd-journald.socket",
    "systemd-journald-dev-log.socket",
)
TARGET = "refitd-test.target"
TARGET_UNIT = """\
[Unit]
Requires=basic.target systemd-journald.service
After=basic.target systemd-journald.service
AllowIsolate=yes
"""
# A machine with many busy processes needs most of a minute to import vLLM alone.
TIMEOUT_SECONDS = 240.0
LOOK_SECONDS = 0.05
# While an engine starts, which takes most of a minute and the processor that a look would take.
PATIENT_LOOK_SECONDS = 0.5
T = TypeVar("T")


def why_not_here() -> str | None:
    """Why no systemd can be booted on this machine, None where it can."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces and cgroups"
    if not SYSTEMD.exists():
        return f"{SYSTEMD} is not installed"
    missing = [tool for tool in ("unshare", "nsenter", "setpriv", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if cgroup_root() is None:
        return "no cgroup v2 tree that can be written to"
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "--cgroup", "true"], capture_output=True).returncode:
        return "namespaces are not allowed here"
    return None


def cgroup_root() -> Path | None:
    """Where cgroup v2 is mounted, alone or beside v1."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2" and "rw" in options.split(","):
            return Path(place)
    return None


class BootedSystemd:
    """PID 1 of its own namespaces, in a cgroup of its own; `close` leaves no process, mount or cgroup behind."""

    def __init__(self, units: Path) -> None:
        root = cgroup_root()
        assert root is not None, "ask why_not_here first"
        self._cgroup = root / f"refitd-test-{os.getpid()}-{time.monotonic_ns()}"
        self._cgroup.mkdir()
        self.units = units
        self._lay_out(units)
        script = Path(__file__).with_name("boot-systemd.sh")
        self._console = (units / "console.txt").open("wb")
        # Should the test run be killed, so is all of this.
        command = ["setpriv", "--pdeathsig", "KILL", str(script), str(self._cgroup), str(units), TARGET]
        self._outer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._console, stderr=self._console)
        try:
            self.pid = wait_for(self._first_process, "a first process in the new namespaces")
            wait_for(self._is_up, "systemd to come up")
        except BaseException:
            self.close()
            raise

    def systemctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("systemctl", *arguments, check=check)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command inside, with its output; a failure that was not expected raises AssertionError with the journal."""
        try:
            finished = subprocess.run(self.inside(*command), capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{command} takes too long\n{self.journal()}") from None
        if check and finished.returncode:
            raise AssertionError(f"{command} failed\n{finished.stdout}{finished.stderr}\n{self.journal()}")
        return finished

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` beside the services."""
        return ["nsenter", "-t", str(self.pid), "-m", "-p", "-i", "-u", "-C", *command]

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        shown = self.systemctl("show", unit, *(f"--property={name}" for name in properties)).stdout
        return dict(line.split("=", 1) for line in shown.splitlines())

    def journal(self, *arguments: str) -> str:
        finished = subprocess.run(
            self.inside("journalctl", "--no-pager", "--output=cat", *arguments), capture_output=True, text=True
        )
        return finished.stdout

    def processes(self, unit: str) -> list[int]:
        """Living processes in the unit's cgroup by their pids out here; zombies hold nothing and do not count."""
        listed = self._cgroup.glob(f"**/{unit}/**/cgroup.procs")
        pids = [int(pid) for path in listed for pid in path.read_text().split()]
        return sorted(pid for pid in pids if is_alive(pid))

    def close(self) -> None:
        (self._cgroup / "cgroup.kill").write_text("1")
        self._outer.wait(TIMEOUT_SECONDS)
        self._console.close()
        wait_for(lambda: "populated 0" in (self._cgroup / "cgroup.events").read_text(), "the cgroup to be empty")
        for folder in sorted(self._cgroup.glob("**/"), reverse=True):
            folder.rmdir()

    def _lay_out(self, units: Path) -> None:
        for name in STOCK:
            shutil.copy(STOCK_UNITS / name, units / name)
        (units / TARGET).write_text(TARGET_UNIT)

    def _first_process(self) -> int | None:
        if self._outer.poll() is not None:
            raise AssertionError(f"booting failed: {Path(self._console.name).read_text()}")
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def _is_up(self) -> bool:
        asked = subprocess.run(self.inside("systemctl", "is-active", TARGET), capture_output=True, text=True)
        return asked.stdout.strip() == "active"


def wait_for(condition: Callable[[], T | None], what: str, look_seconds: float = LOOK_SECONDS) -> T:
    """The first truthy result; to ask across the namespaces costs a process, so that is not done too often."""
    return until(condition, what, TIMEOUT_SECONDS, look_seconds)
