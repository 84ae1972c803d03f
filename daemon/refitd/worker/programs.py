"""Chooses what runs a set of copies: threads on the CPU, one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from refitd.worker.copies import Copy, CopyProgram, merge_neighbours


class Program(Protocol):
    """Holds views of both sides, so it must be dropped before a mapping it reads can be closed."""

    size_bytes: int

    def start(self) -> None:
        """Reads that are enqueued afterwards on the same stream see every byte."""

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Returns when every byte has arrived; at once if nothing was started. `meanwhile`, which is short, is called
        now and then."""

    def has_arrived(self) -> bool:
        """Whether `wait` would return at once."""

    def run(self) -> None:
        """Starts and waits."""


def copy_program(copies: Sequence[Copy]) -> Program:
    """Compiled once for a layout, run at every commit."""
    if copies and copies[0].target.is_cuda:
        # CuPy is only there where the engine runs on a GPU.
        from refitd.worker.cuda_copies import DeviceCopies

        return DeviceCopies(merge_neighbours(copies))
    return CopyProgram(copies)
