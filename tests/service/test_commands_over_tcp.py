"""The commands that look at a running daemon, against one that listens on TCP only and has loaded no engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq.auth
from typer.testing import CliRunner, Result

from refit_trainer import CurveKeys
from refitd.cli import app
from refitd.curve import write_keys
from tests.daemon_process import DaemonProcess, ended, start_daemon
from tests.ports import reserved_port


@dataclass(frozen=True)
class KeyFiles:
    """`daemon_public` and what its clients have: `friend` is on its list, `stranger` is not."""

    daemon_public: Path
    friend: Path
    stranger: Path

    def options(self, **other: Path | str) -> list[str]:
        """`--keys` and `--server-key` of the friend, or others."""
        given = {"keys": self.friend, "server-key": self.daemon_public, **other}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def directory(short_directory: Path) -> Path:
    return short_directory / "commands-over-tcp"


@pytest.fixture(scope="module")
def files(directory: Path) -> KeyFiles:
    public, _ = write_keys(directory / "server", "daemon")
    known, friend = write_keys(directory / "friend", "friend")
    _, stranger = write_keys(directory / "stranger", "stranger")
    (directory / "clients").mkdir()
    known.rename(directory / "clients" / known.name)
    return KeyFiles(public, friend, stranger)


@pytest.fixture(scope="module")
def remote(model_path: Path, directory: Path, files: KeyFiles) -> Iterator[DaemonProcess]:
    """Started once it answers; its model is never loaded."""
    secret = files.daemon_public.with_suffix(".key_secret")
    settings = (
        "defer_load=true",
        f"server.curve_secret_key={secret}",
        f"server.curve_clients={directory / 'clients'}",
    )
    curve = CurveKeys(zmq.auth.load_certificate(files.daemon_public)[0], *zmq.auth.load_certificate(files.friend))
    with reserved_port() as port:
        endpoint = f"tcp://127.0.0.1:{port}"
        with ended(start_daemon(model_path, directory, *settings, endpoint=endpoint, curve=curve)) as daemon:
            daemon.connect(timeout_seconds=120.0).close()
            yield daemon


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def assert_one_line(refused: Result, code: int, *named: str) -> None:
    assert refused.exit_code == code, refused.output
    [line] = refused.stderr.splitlines()
    for part in named:
        assert part in line


def test_status_with_keys(remote: DaemonProcess, files: KeyFiles) -> None:
    """The daemon's key may be a file or the key itself."""
    key = zmq.auth.load_certificate(files.daemon_public)[0].decode()
    for server_key in (files.daemon_public, key):
        options = files.options(**{"server-key": server_key})
        shown = run("status", "--json", "--endpoint", remote.endpoint, *options)
        assert shown.exit_code == 0, shown.output
        status = json.loads(shown.stdout)
        assert (status["state"], status["pid"]) == ("unloaded", remote.process.pid)


def test_reload_with_keys(remote: DaemonProcess, files: KeyFiles) -> None:
    """It reaches the daemon, whose own refusal it shows."""
    refused = run("reload", "--endpoint", remote.endpoint, *files.options())
    assert_one_line(refused, 1, "loading")


def test_doctor_with_keys(remote: DaemonProcess, files: KeyFiles) -> None:
    """Whether processes and devices fit together is not asked of a daemon that may be on another machine."""
    shown = json.loads(run("doctor", "--json", "--endpoint", remote.endpoint, *files.options()).stdout)
    found = {finding["check"]: finding for finding in shown["findings"]}
    assert found["version"]["verdict"] == "pass"
    assert found["daemon"]["verdict"] == "skip"
    assert "over TCP" in found["daemon"]["found"]
    assert not {"user", "PID namespace", "same devices"} & set(found)


def test_top_with_keys(remote: DaemonProcess, files: KeyFiles) -> None:
    """It shows the daemon, and ends with Ctrl-C."""
    command = [sys.executable, "-m", "refitd", "top", "--endpoint", remote.endpoint, *files.options()]
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as shown:
        assert shown.stdout is not None
        try:
            seen = [next(shown.stdout)]
            while b"unloaded" not in seen[-1]:
                seen.append(next(shown.stdout))
            shown.send_signal(signal.SIGINT)
            shown.communicate(timeout=60)
        finally:
            shown.kill()
    assert shown.returncode == 0


def test_wrong_keys(remote: DaemonProcess, files: KeyFiles) -> None:
    """A client that is not on the list, or takes another key for the daemon's, is told to look at its keys."""
    for wrong in ("keys", "server-key"):
        options = files.options(**{wrong: files.stranger})
        assert_one_line(run("status", "--endpoint", remote.endpoint, *options), 1, "CURVE keys")
        shown = json.loads(run("doctor", "--json", "--endpoint", remote.endpoint, *options).stdout)
        [silent] = [finding for finding in shown["findings"] if finding["check"] == "daemon"]
        assert "missing or wrong CURVE keys" in silent["found"]


def test_nobody_at_the_address(files: KeyFiles) -> None:
    """Silence may come from wrong keys, too, and that is said."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        refused = run("status", "--endpoint", endpoint, *files.options())
    assert_one_line(refused, 1, "no daemon answered", "wrong CURVE keys can look like silence")


@pytest.mark.parametrize("command", ["status", "reload", "top", "doctor"])
def test_tcp_without_keys(command: str, files: KeyFiles) -> None:
    """What is missing is named, also where one of the two is given."""
    reach = (command, "--endpoint", "tcp://127.0.0.1:1")
    for some in ((), ("--keys", str(files.friend)), ("--server-key", str(files.daemon_public))):
        assert_one_line(run(*reach, *some), 2, "--keys FILE", "--server-key FILE_OR_KEY", "refitd keygen")


@pytest.mark.parametrize("command", ["status", "reload", "top", "doctor"])
def test_keys_for_a_local_socket(command: str, files: KeyFiles, tmp_path: Path) -> None:
    """They would not be used: whoever gives them means another endpoint."""
    refused = run(command, "--endpoint", f"ipc://{tmp_path}/s", *files.options())
    assert_one_line(refused, 2, "--keys and --server-key are for tcp://", f"ipc://{tmp_path}/s")


def test_files_that_hold_no_key(files: KeyFiles, tmp_path: Path) -> None:
    """Each in one line that names the option and the file, before anybody is asked."""
    reach = ("status", "--endpoint", "tcp://127.0.0.1:1")
    malformed = {"empty": "", "no-value": "public-key\n", "short": 'public-key = "abc"\n', "text": "a key\n"}
    for name, content in malformed.items():
        (tmp_path / name).write_text(content)
    for name in (*malformed, "missing", "."):
        path = tmp_path / name
        for option in ("keys", "server-key"):
            refused = run(*reach, *files.options(**{option: path}))
            assert_one_line(refused, 2, f"--{option}: {path} holds no CURVE key")
    assert_one_line(run(*reach, *files.options(keys=files.daemon_public)), 2, "holds no secret key")


def test_a_secret_that_others_can_read(files: KeyFiles, tmp_path: Path) -> None:
    """It is secret no more."""
    _, secret = write_keys(tmp_path / "open", "open")
    secret.chmod(0o640)
    refused = run("status", "--endpoint", "tcp://127.0.0.1:1", *files.options(keys=secret))
    assert_one_line(refused, 2, f"--keys: {secret} can be read by others")


def test_doctor_before_a_start_needs_no_clients_keys(
    files: KeyFiles, directory: Path, model_path: Path, tmp_path: Path
) -> None:
    """The configuration of a daemon over TCP is examined where it will run, before any client has keys."""
    config = tmp_path / "refitd.toml"
    secret = files.daemon_public.with_suffix(".key_secret")
    config.write_text(
        f'model = "{model_path}"\nendpoint = "tcp://127.0.0.1:1"\n'
        f'[server]\ncurve_secret_key = "{secret}"\ncurve_clients = "{directory / "clients"}"\n'
    )
    shown = json.loads(run("doctor", "--json", "--config", str(config)).stdout)
    found = {finding["check"]: finding for finding in shown["findings"]}
    assert found["model"]["verdict"] == "pass"
    assert "missing or wrong CURVE keys" in found["daemon"]["found"]
