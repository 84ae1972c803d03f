"""How much of the weights the engine's workers have loaded, told to the daemon while they cannot answer any call.

Each worker has a file of its own in the runtime directory, which the environment names; the slowest one counts.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

PROGRESS_VARIABLE = "REFIT_LOAD_PROGRESS"
# Finer steps than a bar can show are not written.
STEP = 0.002


class ProgressFile:
    """A worker's, while it loads. It never hinders the load: a file that cannot be written is left alone."""

    def __init__(self, directory: Path, total_bytes: int) -> None:
        self._path = directory / f"load-progress.{os.getpid()}"
        self._total_bytes = max(total_bytes, 1)
        self._loaded_bytes = 0
        self._told = -1.0

    def add(self, size_bytes: int) -> None:
        self._loaded_bytes += size_bytes
        # Files hold a little more than tensors, so the end is said by `done`.
        self._tell(min(self._loaded_bytes / self._total_bytes, 1 - STEP))

    def done(self) -> None:
        self._tell(1.0)

    def _tell(self, fraction: float) -> None:
        if fraction < 1 and fraction - self._told < STEP:
            return
        self._told = fraction
        try:
            self._path.write_text(f"{fraction:.4f}")
        except OSError:
            self._told = 1.0


def prepare(environment: MutableMapping[str, str], runtime_directory: Path) -> None:
    """In the daemon, before it makes the engine: nothing is loaded yet."""
    forget(runtime_directory)
    environment[PROGRESS_VARIABLE] = str(runtime_directory)


def read(runtime_directory: Path) -> float:
    """In the daemon: 0 before the first weight, 1 once every worker has them all."""
    fractions = [_fraction(path) for path in _files(runtime_directory)]
    return min(fractions, default=0.0)


def forget(runtime_directory: Path) -> None:
    for path in _files(runtime_directory):
        path.unlink(missing_ok=True)


def _files(runtime_directory: Path) -> list[Path]:
    return list(runtime_directory.glob("load-progress.*"))


def _fraction(path: Path) -> float:
    try:
        return float(path.read_text() or 0.0)
    except (FileNotFoundError, ValueError):  # gone, or in the middle of being written
        return 0.0
