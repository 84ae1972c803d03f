"""Case D: endpoints that were stolen, misplaced or too long. Nothing here waits for a model to load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon_process import DaemonProcess

CONFIGURATION_EXIT = 2


def serve(model: Path, endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a daemon that must refuse to start."""
    command = [sys.executable, "-m", "refitd", "serve", "--model", str(model), "--endpoint", endpoint, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = (result.stdout + result.stderr).strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_second_daemon_on_the_same_endpoint_refuses(daemon_process: DaemonProcess, model_path: Path) -> None:
    """It names the endpoint and the pid that holds it, and the first goes on."""
    refused = serve(model_path, daemon_process.endpoint)
    assert refused.returncode == CONFIGURATION_EXIT
    assert str(daemon_process.process.pid) in one_line(refused)
    assert daemon_process.status().pid == daemon_process.process.pid


def test_an_ordinary_file_is_never_replaced(model_path: Path, short_directory: Path) -> None:
    """A path where a file lies that is no socket is refused, and the file stays."""
    directory = short_directory / "occupied"
    directory.mkdir(mode=0o700)
    path = directory / "notes.txt"
    path.write_text("do not lose this")
    refused = serve(model_path, f"ipc://{path}")
    assert refused.returncode == CONFIGURATION_EXIT
    assert "left alone" in one_line(refused)
    assert path.read_text() == "do not lose this"


@pytest.mark.parametrize("length", [108, 200])
def test_a_path_too_long_for_a_socket_is_refused(model_path: Path, length: int) -> None:
    """The limit and the path's length are named before anything is loaded."""
    path = "/tmp/" + "x" * (length - len("/tmp/"))
    refused = serve(model_path, f"ipc://{path}")
    assert refused.returncode == CONFIGURATION_EXIT
    assert f"{length} bytes" in one_line(refused)
    assert "107" in one_line(refused)


def test_a_directory_open_to_others_is_refused(model_path: Path, short_directory: Path) -> None:
    """Others could replace the socket there."""
    directory = short_directory / "open"
    directory.mkdir()
    os.chmod(directory, 0o755)
    refused = serve(model_path, f"ipc://{directory}/s")
    assert refused.returncode == CONFIGURATION_EXIT
    assert "open to others" in one_line(refused)


def test_a_missing_model_is_refused(short_directory: Path) -> None:
    """A wrong model path costs no engine start."""
    refused = serve(short_directory / "no-such-model", f"ipc://{short_directory}/s")
    assert refused.returncode == CONFIGURATION_EXIT
    assert "no-such-model" in one_line(refused)


def test_an_unknown_setting_is_refused(model_path: Path, short_directory: Path) -> None:
    """A misspelt key is named, wherever it came from."""
    file = short_directory / "refitd.toml"
    file.write_text("[refit]\npolcy = 'keep'\n")
    refused = serve(model_path, f"ipc://{short_directory}/s", "--config", str(file))
    assert refused.returncode == CONFIGURATION_EXIT
    assert "refit.polcy" in one_line(refused)
