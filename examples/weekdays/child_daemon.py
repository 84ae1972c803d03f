"""A refitd of our own for the time of the demo; a real trainer finds one running already, as a systemd service."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from refit_protocol.states import EngineState
from refit_trainer import Daemon, RefitdError
from refitd import parent_death

START_SECONDS = 300.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.25

# A model of this size is computed in less time than threads need to agree, above all beside other work.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class DaemonFailed(Exception):  # noqa: N818 - what happened
    """The daemon ended, or was not ready in time; the message ends with the last lines of its log."""


@contextmanager
def running_daemon(model_directory: Path, directory: Path, settings: list[str], console: Console) -> Iterator[str]:
    """The endpoint of a daemon for `model_directory`, that ends with the block or, at the latest, this process."""
    endpoint, log = endpoint_in(directory), directory / "refitd.log"
    process = start(model_directory, directory, settings, log)
    try:
        with console.status("") as line:
            for seconds, state in _until_ready(process, endpoint, log):
                line.update(f"refitd (pid {process.pid}) is {state}, {seconds:.0f} s")
        yield endpoint
    finally:
        _stop(process)


def endpoint_in(directory: Path) -> str:
    return f"ipc://{directory}/refitd.sock"


def start(model_directory: Path, directory: Path, settings: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A daemon that is killed when this process ends in whatever way; call it from the main thread."""
    command = [sys.executable, "-m", "refitd", "serve", "--model", str(model_directory)]
    command += ["--endpoint", endpoint_in(directory)]
    for setting in settings:
        command += ["--set", setting]
    environment = {**os.environ, **ONE_THREAD, "HF_HUB_OFFLINE": "1", "REFITD_RUNTIME_DIRECTORY": str(directory)}
    parent_death.export(environment)
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches the demo alone, which then ends the daemon in order.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def _until_ready(process: subprocess.Popen[bytes], endpoint: str, log: Path) -> Iterator[tuple[float, str]]:
    """Yields (seconds since the start, what the daemon says of itself) until it can serve."""
    started = time.monotonic()
    while (state := _state(endpoint)) != EngineState.READY:
        seconds = time.monotonic() - started
        if process.poll() is not None:
            raise DaemonFailed(f"refitd ended with exit code {process.returncode}:\n{_last_lines(log)}")
        if seconds > START_SECONDS:
            raise DaemonFailed(f"refitd was still {state} after {START_SECONDS:.0f} s:\n{_last_lines(log)}")
        yield seconds, state
        time.sleep(POLL_SECONDS)


def _state(endpoint: str) -> str:
    try:
        with Daemon.connect(endpoint, timeout_seconds=1.0) as daemon:
            return daemon.status().state
    except RefitdError:
        return "starting"


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
