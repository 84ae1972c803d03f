"""The unit files and the script that installs them, as systemd's own tools read them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
UNITS = REPOSITORY / "daemon" / "refitd" / "systemd"
SCRIPT = REPOSITORY / "scripts" / "install-service"

needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here"
)


@pytest.fixture
def refitd(tmp_path: Path) -> Path:
    """An executable that the units can name."""
    command = tmp_path / "bin" / "refitd"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    return command


def install(root: Path, *arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CONFIG_HOME"}
    if home is not None:
        environment["HOME"] = str(home)
    return subprocess.run(
        [str(SCRIPT), "--root", str(root), *arguments], env=environment, capture_output=True, text=True
    )


def settings(path: Path) -> list[str]:
    """The assignments of a unit file, comments apart."""
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def test_the_template_is_the_service_with_an_instance() -> None:
    """What is set for one daemon is set for several: the template differs by %i alone."""
    one = settings(UNITS / "refitd.service")
    several = [
        line.replace("refitd/%i.", "refitd/refitd.").replace("-%i", "") for line in settings(UNITS / "refitd@.service")
    ]
    assert [line.replace(" %i:", ":") for line in several] == one


@needs_systemd_analyze
@pytest.mark.parametrize("name", ["refitd.service", "refitd@one.service"])
def test_systemd_understands_what_is_installed(tmp_path: Path, refitd: Path, name: str) -> None:
    """No unknown setting, no bad value, and the command is there."""
    assert install(tmp_path / "root", "--refitd", str(refitd), "--run-as", "root").returncode == 0
    units = tmp_path / "root/etc/systemd/system"
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", f"{name}"],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"},
        capture_output=True,
        text=True,
    )
    complaints = [line for line in verified.stderr.splitlines() if "refitd" in line]
    assert (verified.returncode, complaints) == (0, [])


@needs_systemd_analyze
def test_the_sandbox_stays_as_tight_as_the_manual_says(tmp_path: Path, refitd: Path) -> None:
    """systemd's own score, run as an ordinary user, is at most 2.6 of 10."""
    install(tmp_path, "--refitd", str(refitd), "--run-as", "daemon")
    scored = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=26", "--no-pager", "refitd.service"],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}/etc/systemd/system:"},
        capture_output=True,
        text=True,
    )
    assert scored.returncode == 0, scored.stdout.splitlines()[-1]


@pytest.mark.parametrize("unit", ["refitd.service", "refitd@.service", "sandbox.conf"])
def test_nothing_hides_memory_or_devices(unit: str) -> None:
    """Options that would break sharing memory or GPUs are off, in whichever file somebody adds them."""
    forbidden = ("PrivateTmp=yes", "PrivateIPC", "PrivateUsers", "PrivateDevices", "ProcSubset", "ProtectProc")
    forbidden += ("DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute", "DynamicUser", "PrivatePIDs")
    assert [line for line in settings(UNITS / unit) if line.startswith(forbidden)] == []


def test_the_stop_outlasts_the_drain() -> None:
    """systemd must not kill what is still within its drain time, nor take a slow answer for a hang."""
    from refitd.config import EngineConfig, ShutdownConfig

    values = dict(line.split("=", 1) for line in settings(UNITS / "refitd.service") if "=" in line)
    assert int(values["TimeoutStopSec"]) > ShutdownConfig().drain_seconds + 10
    engine = EngineConfig()
    assert int(values["WatchdogSec"]) > 2 * (engine.liveness_timeout_seconds + engine.liveness_interval_seconds)


def test_a_system_install_knows_user_and_command(tmp_path: Path, refitd: Path) -> None:
    """Both units get the command, the user and the sandbox; an ordinary user gets no capability."""
    install(tmp_path / "root", "--refitd", str(refitd), "--run-as", "daemon")
    for unit, configuration in (("refitd.service", "refitd"), ("refitd@.service", "%i")):
        drop_ins = tmp_path / "root/etc/systemd/system" / f"{unit}.d"
        facts = settings(drop_ins / "zz-installed.conf")
        assert facts[:4] == [
            "[Service]",
            "ExecStart=",
            f"ExecStart={refitd} serve --config %E/refitd/{configuration}.toml",
            "User=daemon",
        ]
        assert not any("Capability" in line for line in facts)
        assert (drop_ins / "sandbox.conf").read_text() == (UNITS / "sandbox.conf").read_text()


def test_a_user_install_has_no_sandbox(tmp_path: Path, refitd: Path) -> None:
    """A login's own service goes to its home, starts with the login, and has nothing that needs root."""
    home = Path("/home/somebody")
    assert install(tmp_path / "root", "--user", "--refitd", str(refitd), home=home).returncode == 0
    units = tmp_path / "root/home/somebody/.config/systemd/user"
    assert "WantedBy=default.target" in settings(units / "refitd.service")
    assert [file.name for file in (units / "refitd.service.d").iterdir()] == ["zz-installed.conf"]
    assert not any("User=" in line for line in settings(units / "refitd.service.d/zz-installed.conf"))


def test_installing_again_keeps_the_configuration(tmp_path: Path, refitd: Path) -> None:
    """An upgrade replaces units and leaves what the operator wrote, also when everything is removed."""
    arguments = ("--refitd", str(refitd), "--run-as", "root")
    install(tmp_path, *arguments)
    configuration = tmp_path / "etc/refitd/refitd.toml"
    configuration.write_text('model = "mine"\n')
    own = tmp_path / "etc/systemd/system/refitd.service.d/override.conf"
    own.write_text("[Service]\n")
    install(tmp_path, *arguments)
    assert install(tmp_path, "--uninstall").returncode == 0
    assert configuration.read_text() == 'model = "mine"\n'
    assert [path for path in (tmp_path / "etc/systemd/system").rglob("*") if path.is_file()] == [own]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--run-as", "nobody-by-this-name"), "user nobody-by-this-name does not exist"),
        (("--refitd", "relative/refitd"), "relative/refitd is not an absolute path of an executable"),
        (("--frobnicate",), "unknown argument --frobnicate"),
    ],
)
def test_mistakes_are_named_and_install_nothing(
    tmp_path: Path, refitd: Path, arguments: tuple[str, ...], reason: str
) -> None:
    """Exit 2, one line, no file."""
    root = tmp_path / "root"
    finished = install(root, "--refitd", str(refitd), *arguments)
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[-1] == f"install-service: {reason}"
    assert not root.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user")
def test_a_command_that_the_services_user_cannot_run_is_named(tmp_path: Path, refitd: Path) -> None:
    """As one in another's home; an image that is only being made may open it later."""
    refitd.parent.chmod(0o700)
    finished = install(tmp_path / "root", "--refitd", str(refitd), "--run-as", "daemon")
    assert f"user daemon cannot run {refitd}" in finished.stderr
    assert install(tmp_path / "root", "--refitd", str(refitd), "--run-as", "root").stderr == ""


def test_the_command_installs_itself(tmp_path: Path) -> None:
    """As from a wheel, which has no scripts: the command of this environment, with the script's own options."""
    command = [sys.executable, "-m", "refitd", "install-service", "--root", str(tmp_path), "--run-as", "root"]
    subprocess.run(command, check=True, capture_output=True)
    facts = settings(tmp_path / "etc/systemd/system/refitd.service.d/zz-installed.conf")
    own = Path(sys.executable).with_name("refitd")
    assert f"ExecStart={own} serve --config %E/refitd/refitd.toml" in facts
    helped = subprocess.run([*command[:4], "--help"], check=True, capture_output=True, text=True)
    assert "usage: refitd install-service" in helped.stdout


def test_the_example_configuration_is_valid(tmp_path: Path) -> None:
    """What is installed as an example can be loaded as it is, and with its suggestions switched on."""
    from refitd.config import load_config

    example = UNITS / "refitd.toml"
    assert load_config({}, example).model == "/srv/models/change-me"
    switched_on = tmp_path / "refitd.toml"
    switched_on.write_text(re.sub(r"^# (\w+ = )", r"\1", example.read_text(), flags=re.MULTILINE))
    assert load_config({}, switched_on).engine.enable_sleep_mode
