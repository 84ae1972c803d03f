"""`scripts/install-service --user` under a real user manager: a service of a login, with no root and no sandbox."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.service.booted import BootedSystemd, wait_for
from tests.service.conftest import REPOSITORY

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(300)]

# What a login makes of user@.service, as the user who runs the tests.
MANAGER = """\
[Service]
Type=notify
Environment=XDG_RUNTIME_DIR=/run/login HOME=/run/home PATH={path}
RuntimeDirectory=login home
RuntimeDirectoryMode=0700
Delegate=yes
KillMode=mixed
ExecStart=/lib/systemd/systemd --user
"""


@dataclass(frozen=True)
class Login:
    """A user's own manager, and commands as they are typed after logging in."""

    systemd: BootedSystemd

    def run(self, *command: str, check: bool = True) -> str:
        paths = ":".join(str(REPOSITORY / root) for root in ("daemon", "protocol", "trainer_side", "."))
        session = ["XDG_RUNTIME_DIR=/run/login", "HOME=/run/home", f"PYTHONPATH={paths}"]
        return self.systemd.run("env", "-u", "REFITD_ENDPOINT", *session, *command, check=check).stdout

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        return self.run("systemctl", "--user", *arguments, check=check)

    def install(self, *arguments: str) -> None:
        refitd = Path(sys.executable).with_name("refitd")
        self.run(str(REPOSITORY / "scripts" / "install-service"), "--user", "--refitd", str(refitd), *arguments)


@pytest.fixture
def login(systemd: BootedSystemd) -> Iterator[Login]:
    unit = systemd.units / "test-login.service"
    unit.write_text(MANAGER.format(path="/usr/bin:/bin"))
    systemd.systemctl("daemon-reload")
    systemd.systemctl("start", unit.name)
    try:
        yield Login(systemd)
    finally:
        systemd.systemctl("stop", unit.name)
        unit.unlink()


def test_a_login_installs_starts_and_removes_its_own_service(login: Login, model_path: Path) -> None:
    """It starts with the login, trainers find it without a variable, stops cleanly, and leaves the configuration."""
    login.install()
    settings = Path(f"/proc/{login.systemd.pid}/root/run/home/.config/refitd/refitd.toml")
    settings.write_text(f'model = "{model_path}"\ndefer_load = true\n')
    login.systemctl("enable", "--now", "refitd")
    assert "refitd.service" in login.systemctl("list-dependencies", "--plain", "default.target")
    assert shown(login, "StatusText").startswith(str(model_path))
    assert json.loads(login.run(sys.executable, "-m", "refitd", "status", "--json"))["state"] == "unloaded"
    pid = shown(login, "MainPID")
    login.systemctl("kill", "--signal=KILL", "refitd")
    wait_for(lambda: shown(login, "MainPID") not in ("0", pid), "the service to come back by itself")
    wait_for(lambda: shown(login, "ActiveState") == "active", "it to be ready again")
    login.systemctl("stop", "refitd")
    assert (shown(login, "Result"), shown(login, "ExecMainStatus")) == ("success", "0")
    login.install("--uninstall")
    assert "not-found" in login.systemctl("show", "--property=LoadState", "refitd")
    assert settings.exists()


def shown(login: Login, name: str) -> str:
    return login.systemctl("show", "--value", f"--property={name}", "refitd").strip()
