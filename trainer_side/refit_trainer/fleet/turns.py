"""Batches of one version run side by side, a refit runs alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Turns:
    """A refit that waits holds new batches back, so it comes to its turn. Belongs to one event loop."""

    def __init__(self) -> None:
        self._batches = 0
        self._refits_waiting = 0
        self._refitting = False
        self._changed = asyncio.Event()

    @property
    def batches(self) -> int:
        """Those under way."""
        return self._batches

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._refitting and not self._refits_waiting)
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
            self._wake()

    @asynccontextmanager
    async def refit(self, timeout_seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError."""
        self._refits_waiting += 1
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._until(lambda: not self._refitting and not self._batches)
            self._refitting = True
        finally:
            self._refits_waiting -= 1
            self._wake()
        try:
            yield
        finally:
            self._refitting = False
            self._wake()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
