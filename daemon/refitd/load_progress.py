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
        self._next = directory / f"load-progress-next.{os.getpid()}"
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
            # A reader finds the last fraction or the next, never an empty file between them.
            self._next.write_text(f"{fraction:.4f}")
            self._next.replace(self._path)
        except OSError:
            self._told = 1.0


def prepare(environment: MutableMapping[str, str], runtime_directory: Path) -> None:
    """In the daemon, before it makes the engine: nothing is loaded yet."""
    forget(runtime_directory)
    environment[PROGRESS_VARIABLE] = str(runtime_directory)


class LoadProgress:
    """The daemon's view of one load. It never falls, although a worker that begins late has loaded less than others."""

    def __init__(self, runtime_directory: Path) -> None:
        self._directory = runtime_directory
        self._highest = 0.0

    def read(self) -> float:
        """0 before the first weight, 1 once every worker has them all."""
        fractions = [_fraction(path) for path in _files(self._directory)]
        self._highest = max(self._highest, min(fractions, default=0.0))
        return self._highest


def forget(runtime_directory: Path) -> None:
    for path in [*_files(runtime_directory), *runtime_directory.glob("load-progress-next.*")]:
        path.unlink(missing_ok=True)


def _files(runtime_directory: Path) -> list[Path]:
    return list(runtime_directory.glob("load-progress.*"))


def _fraction(path: Path) -> float:
    try:
        return float(path.read_text())
    except FileNotFoundError:
        return 0.0
