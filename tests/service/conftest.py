"""One booted systemd for all tests of the service, with the units as scripts/install-service puts them in place."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.daemon_process import SPARING
from tests.service.booted import LOOK_SECONDS, PATIENT_LOOK_SECONDS, BootedSystemd, wait_for, why_not_here

REPOSITORY = Path(__file__).parents[2]

# One engine start costs most of a test's time: restart at once, and give up on silence soon.
CONFIGURATION = """\
model = "{model}"
[engine]
enforce_eager = true
cpu_kv_cache_gib = 1
max_model_len = 256
max_num_seqs = 32
liveness_interval_seconds = 0.5
liveness_timeout_seconds = 5.0
[shutdown]
drain_seconds = 3.0
"""
# With the caches of the machine: in empty ones vLLM would inspect the model and torch compile its headers in every run.
DROP_IN = """\
[Service]
RestartSec=100ms
WatchdogSec={watchdog_seconds}
TimeoutAbortSec=1
ReadWritePaths={vllm} {inductor}
Environment=VLLM_CACHE_ROOT={vllm} TORCHINDUCTOR_CACHE_DIR={inductor} HF_HUB_OFFLINE=1 {variables}
"""


@dataclass(frozen=True)
class Service:
    """A unit of refitd inside the booted systemd."""

    systemd: BootedSystemd
    unit: str

    def show(self, name: str) -> str:
        return self.systemd.show(self.unit, name)[name]

    @property
    def main_pid(self) -> int:
        """As the processes inside see it."""
        return int(self.show("MainPID"))

    def is_active(self) -> bool:
        return self.show("ActiveState") == "active"

    def processes(self) -> list[int]:
        """As seen out here, the daemon's first."""
        return self.systemd.processes(self.unit)

    def wait_for(self, condition: Callable[[], bool], what: str, look_seconds: float = LOOK_SECONDS) -> None:
        """As `booted.wait_for`; what it did instead is told where it never comes."""
        try:
            wait_for(condition, what, look_seconds)
        except AssertionError as late:
            late.add_note(self.account())
            raise

    def wait_for_drain(self) -> None:
        """Until it says so; a unit that has ended meanwhile never will."""
        self.wait_for(lambda: "drain" in self.show("StatusText") or not self.main_pid, f"{self.unit} to drain")
        assert self.main_pid, self.account()

    def account(self) -> str:
        """How it stands, and the end of its journal."""
        names = ("ActiveState", "SubState", "Result", "ExecMainStatus", "NRestarts", "StatusText")
        state = ", ".join(f"{name}={self.show(name)}" for name in names)
        return "\n".join([state, *self.journal().splitlines()[-60:]])

    def start(self) -> None:
        """Starts it, if need be, and waits until it says that it is ready."""
        self.systemd.systemctl("reset-failed", self.unit, check=False)
        self.systemd.systemctl("start", self.unit)
        self.wait_until_active()

    def wait_until_active(self) -> None:
        self.wait_for(self.is_active, f"{self.unit} to be active", PATIENT_LOOK_SECONDS)

    def stop(self) -> None:
        self.systemd.systemctl("stop", self.unit)

    def signal(self, pid: int, name: str) -> None:
        """`pid` is one of `processes()`."""
        subprocess.run(["kill", "-s", name, str(pid)], check=True)

    def wait_for_restart(self, old_pid: int) -> None:
        """Until systemd has started another main process than `old_pid`."""
        self.wait_for(lambda: self.main_pid not in (0, old_pid), f"{self.unit} to be started again")

    def wait_until_active_again(self, old_pid: int) -> None:
        self.wait_for_restart(old_pid)
        self.wait_until_active()

    def journal(self) -> str:
        return self.systemd.journal("-u", self.unit)

    def client(self, what: str) -> list[str]:
        """The command line of `tests.service.client` beside the service."""
        paths = ":".join(str(REPOSITORY / root) for root in ("daemon", "protocol", "trainer_side", "."))
        return self.systemd.inside("env", f"PYTHONPATH={paths}", sys.executable, "-m", "tests.service.client", what)


def configure(systemd: BootedSystemd, name: str, content: str) -> None:
    """Writes /etc/refitd/NAME.toml inside."""
    directory = Path(f"/proc/{systemd.pid}/root/etc/refitd")
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.toml").write_text(content)


@pytest.fixture(scope="session")
def systemd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedSystemd]:
    reason = why_not_here()
    if reason is not None:
        pytest.skip(f"no systemd can be booted: {reason}")
    root = tmp_path_factory.mktemp("machine")
    install = [str(REPOSITORY / "scripts" / "install-service"), "--root", str(root), "--run-as", "root"]
    command = Path(sys.executable).with_name("refitd")
    subprocess.run([*install, "--refitd", str(command)], check=True, capture_output=True)
    units = root / "etc" / "systemd" / "system"
    _add_drop_ins(units)
    booted = BootedSystemd(units)
    try:
        yield booted
    finally:
        booted.close()


@pytest.fixture(scope="session")
def service(systemd: BootedSystemd, model_path: Path) -> Service:
    """refitd.service with a real engine; started by the first test that needs it running."""
    configure(systemd, "refitd", CONFIGURATION.format(model=model_path))
    return Service(systemd, "refitd.service")


@pytest.fixture(scope="session")
def idle_service(systemd: BootedSystemd, model_path: Path) -> Service:
    """refitd@idle.service, which loads no model until it is asked to: for everything that needs no engine."""
    configure(systemd, "idle", f"defer_load = true\n{CONFIGURATION.format(model=model_path)}")
    return Service(systemd, "refitd@idle.service")


def _add_drop_ins(units: Path) -> None:
    vllm = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm"))
    of_the_user = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    inductor = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", of_the_user))
    for cache in (vllm, inductor):
        cache.mkdir(parents=True, exist_ok=True)
    # Coverage and the like must reach the daemon, whose environment systemd makes from nothing.
    inherited = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    variables = " ".join(f"{name}={value}" for name, value in {**SPARING, **inherited}.items())
    for unit, watchdog_seconds in (("refitd.service", 60), ("refitd@.service", 10)):
        content = DROP_IN.format(vllm=vllm, inductor=inductor, variables=variables, watchdog_seconds=watchdog_seconds)
        (units / f"{unit}.d" / "zz-tests.conf").write_text(content)
