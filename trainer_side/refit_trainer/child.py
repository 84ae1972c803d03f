"""A daemon of one's own: a child process that ends with its parent, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from refit_trainer.errors import DaemonUnreachable

# The daemon's own name for the process that it must not outlive; see `refitd.parent_death`.
_PARENT_VARIABLE = "REFIT_PARENT"
_STOP_SECONDS = 60.0
_LOG_TAIL_BYTES = 4000


class ChildDaemon:
    """Runs from construction to `stop()`. Make it from a thread that lives as long as it should: the kernel ends a
    child with the thread that made it.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings` are the daemon's by their names, such as `engine.max_model_len`."""
        self._directory = tempfile.TemporaryDirectory(prefix="refitd-")
        directory = Path(self._directory.name)
        self.endpoint = f"ipc://{directory}/refitd.sock"
        self._log = directory / "daemon.log"
        own = {"endpoint": self.endpoint, "runtime_directory": str(directory)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "refitd", "serve", *_options({**settings, **own})],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, _PARENT_VARIABLE: _own_identity()},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises `DaemonUnreachable` with the end of its log where it has ended."""
        if (code := self._process.poll()) is not None:
            raise DaemonUnreachable(f"the daemon ended with exit code {code}: {self._log_tail()}")

    def stop(self) -> None:
        """Lets it end in order; ends it where it does not. May be called twice."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()

    def _log_tail(self) -> str:
        return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()


def _options(settings: Mapping[str, Any]) -> Iterable[str]:
    for name, value in settings.items():
        yield "--set"
        yield f"{name}={_toml(value)}"


def _toml(value: Any) -> str:
    """Enough of TOML for what a setting can be; nested tables are inline ones."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _own_identity() -> str:
    """Pid and start time, in clock ticks since boot: field 22 of proc(5), whose field 2 may hold anything."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return f"{os.getpid()}:{fields[19]}"
