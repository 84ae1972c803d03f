"""NaN taken out of the KV cache while requests are served.

A request whose logits are no numbers leaves NaN in its blocks, and a block that holds any makes NaN of every attention
that reads it: whoever got these blocks next would fail too, until the next refit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from refitd.engine import Engine

log = structlog.get_logger()


class Cleaning:
    """`order` is held while it goes on; `is_held` says that something else has the engine, and will clean itself.
    `stand_down` comes first: what stands by may need the order to end."""

    def __init__(
        self,
        engine: Engine,
        deadline_seconds: float,
        is_held: Callable[[], bool],
        stand_down: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._deadline_seconds = deadline_seconds
        self._is_held = is_held
        self._stand_down = stand_down
        self.order = asyncio.Lock()
        self.task: asyncio.Task[None] | None = None

    def soon(self) -> None:
        """To be called whenever NaN was made."""
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run(), name="clean-cache")

    async def _run(self) -> None:
        try:
            while self._engine.nan_seen and not self._is_held():
                await self._stand_down()
                async with self.order:
                    await self._clean()
        # The boundary of a task that nobody waits for: an engine that has died has its own way to say so.
        except Exception as error:  # noqa: BLE001
            log.warning("the KV cache could not be cleaned", reason=str(error))

    async def _clean(self) -> None:
        """The engine stands still from the first moment on: who comes now must not get such a block before."""
        if self._is_held():
            return
        try:
            await self._engine.freeze(clear_cache=False, timeout_seconds=self._deadline_seconds)
            if not await self._engine.cache_is_finite(self._deadline_seconds):
                await self._clean_all()
        finally:
            await self._engine.thaw(self._deadline_seconds)

    async def _clean_all(self) -> None:
        """Running requests prefill again: what they have computed since may have been made of it."""
        await self._engine.freeze(clear_cache=True, timeout_seconds=self._deadline_seconds)
        await self._engine.clean_cache(self._deadline_seconds)
        log.warning("requests made NaN: the KV cache was cleaned, running requests prefill again")
