"""The writer's role of a session: one refit at a time, and the sources that the daemon has open for us."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AcquireWriter,
    CloseSource,
    OpenSource,
    PlanMode,
    ReleaseWriter,
    SourceClosed,
    SourceOpened,
    WriterAcquired,
    WriterReleased,
)
from refit_protocol.tensors import SourceTensor, TensorShape
from refit_trainer.backends import ExportedMemory
from refit_trainer.connection import Connection
from refit_trainer.errors import RefitdError

# After these the daemon no longer knows our role or our sources; the next refit starts over.
_ROLE_LOST = frozenset({ErrorCode.STALE_EPOCH, ErrorCode.UNKNOWN_SOURCE, ErrorCode.NO_SESSION})


@dataclass(frozen=True)
class _Source:
    """`memory` is weak: what the trainer has dropped is closed at the next occasion, not kept."""

    number: int
    memory: weakref.ref[ExportedMemory]


class WriterRole:
    """A second refit waits for the first. Belongs to the event loop of the connection."""

    def __init__(self, connection: Connection, plan: PlanMode | None) -> None:
        self._connection = connection
        self._plan = plan
        self._lock = asyncio.Lock()
        self._session = ""
        self._epoch: int | None = None
        self._sources: list[_Source] = []
        self._announced: dict[int, list[TensorShape]] = {}

    async def acquire(self, *, takeover: bool, timeout_seconds: float) -> None:
        async with self._lock:
            await self._acquire(takeover=takeover, timeout_seconds=timeout_seconds)

    async def release(self, *, timeout_seconds: float) -> None:
        """Gives the role up; the daemon closes our sources with it."""
        async with self._lock:
            await self.give_up(timeout_seconds=timeout_seconds)

    async def give_up(self, *, timeout_seconds: float) -> None:
        """`release` inside `enter()` and `leave()`."""
        self._forget()
        await self._connection.request(ReleaseWriter(), WriterReleased, timeout_seconds=timeout_seconds)

    @contextlib.asynccontextmanager
    async def writing(self, timeout_seconds: float) -> AsyncIterator[int]:
        """For one refit: yields the epoch that its commands carry."""
        epoch = await self.enter(timeout_seconds)
        try:
            yield epoch
        except RefitdError as error:
            self.note(error)
            raise
        finally:
            await self.leave()

    async def enter(self, timeout_seconds: float) -> int:
        await self._lock.acquire()
        try:
            if self._epoch is None or self._session != self._connection.welcome.session:
                await self._acquire(takeover=False, timeout_seconds=timeout_seconds)
            assert self._epoch is not None, "acquired above"
            return self._epoch
        except BaseException:
            self._lock.release()
            raise

    async def leave(self) -> None:
        """A coroutine so that it runs on the loop, whichever thread asks for it."""
        self._lock.release()

    def note(self, error: BaseException) -> None:
        """What a refit failed with may mean that the role is lost."""
        if isinstance(error, RefitdError) and error.code in _ROLE_LOST:
            self._forget()

    async def source_of(
        self,
        memory: ExportedMemory,
        kind: Literal["inplace", "bucket"],
        tensors: Sequence[SourceTensor],
        *,
        timeout_seconds: float,
    ) -> int:
        """The number of the source that exports `memory`, opened the first time."""
        for source in self._sources:
            if source.memory() is memory:
                return source.number
        await self._close_dead_sources(timeout_seconds)
        command = OpenSource(
            epoch=self._written_epoch, kind=kind, segments=memory.segments, tensors=list(tensors), plan=self._plan
        )
        opened = await self._connection.request(command, SourceOpened, timeout_seconds=timeout_seconds)
        self._sources.append(_Source(opened.source, weakref.ref(memory)))
        return opened.source

    def announced(self, source: int) -> list[TensorShape] | None:
        """What the last refit from this source was begun with, as far as the daemon knows it."""
        return self._announced.get(source)

    def note_announced(self, source: int, tensors: list[TensorShape]) -> None:
        self._announced[source] = tensors

    @property
    def _written_epoch(self) -> int:
        assert self._epoch is not None, "only inside enter() and leave()"
        return self._epoch

    async def _acquire(self, *, takeover: bool, timeout_seconds: float) -> None:
        self._forget()
        command = AcquireWriter(takeover=takeover)
        acquired = await self._connection.request(command, WriterAcquired, timeout_seconds=timeout_seconds)
        self._session, self._epoch = self._connection.welcome.session, acquired.epoch

    def _forget(self) -> None:
        self._epoch = None
        self._sources.clear()
        self._announced.clear()

    async def _close_dead_sources(self, timeout_seconds: float) -> None:
        for source in [source for source in self._sources if source.memory() is None]:
            command = CloseSource(epoch=self._written_epoch, source=source.number)
            await self._connection.request(command, SourceClosed, timeout_seconds=timeout_seconds)
            self._sources.remove(source)
            self._announced.pop(source.number, None)
