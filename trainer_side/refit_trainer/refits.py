"""The writer's side of a session: its role, its open sources, and the commands of a refit."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AcquireWriter,
    AttestMode,
    CloseSource,
    CommitRefit,
    InflightPolicy,
    OpenSource,
    PlanMode,
    RefitCommitted,
    RefitReport,
    ReleaseWriter,
    RestoreWeights,
    SourceClosed,
    SourceOpened,
    WeightsRestored,
    WriterAcquired,
    WriterReleased,
)
from refit_trainer.connection import Connection
from refit_trainer.errors import RefitdError
from refit_trainer.replies import GRACE_SECONDS

if TYPE_CHECKING:
    from refit_trainer.sharing import SharedModule

DEADLINE_SECONDS = 300.0

# After these the daemon no longer knows our role or our sources; the next refit starts over.
_ROLE_LOST = frozenset({ErrorCode.STALE_EPOCH, ErrorCode.UNKNOWN_SOURCE, ErrorCode.NO_SESSION})


class RefitOptions(TypedDict, total=False):
    """What is left out is as the daemon is configured; `deadline_seconds`, 300 by default, bounds both sides."""

    version: int | None
    policy: InflightPolicy | None
    only: list[str] | None
    attest: AttestMode | None
    check_finite: bool | None
    deadline_seconds: float


@dataclass
class _Source:
    """A source of this session; `export` is weak so that a dead module's memory is not kept by us."""

    number: int
    export: weakref.ref[SharedModule]


class Refits:
    """One at a time: a second caller waits for the first."""

    def __init__(self, connection: Connection, plan: PlanMode | None) -> None:
        self._connection = connection
        self._plan = plan
        self._lock = asyncio.Lock()
        self._session = ""
        self._epoch: int | None = None
        self._sources: list[_Source] = []

    async def acquire_writer(self, *, takeover: bool, timeout_seconds: float) -> None:
        async with self._lock:
            await self._acquire(takeover=takeover, timeout_seconds=timeout_seconds)

    async def release_writer(self, *, timeout_seconds: float) -> None:
        """Gives the role up; the daemon closes our sources with it."""
        async with self._lock:
            self._forget()
            await self._connection.request(ReleaseWriter(), WriterReleased, timeout_seconds=timeout_seconds)

    async def commit(self, shared: SharedModule, options: RefitOptions) -> RefitReport:
        """Refits from the module's own memory, which may be written again when this returns."""
        options = {"deadline_seconds": DEADLINE_SECONDS, **options}
        timeout_seconds = options["deadline_seconds"] + GRACE_SECONDS
        async with self._writing(timeout_seconds) as epoch:
            source = await self._in_place_source(shared, epoch, timeout_seconds)
            shared.memory.synchronise()
            command = CommitRefit(epoch=epoch, source=source, **options)
            reply = await self._connection.request(command, RefitCommitted, timeout_seconds=timeout_seconds)
            return reply.report

    async def restore(self, *, timeout_seconds: float) -> WeightsRestored:
        async with self._writing(timeout_seconds) as epoch:
            command = RestoreWeights(epoch=epoch)
            return await self._connection.request(command, WeightsRestored, timeout_seconds=timeout_seconds)

    @contextlib.asynccontextmanager
    async def _writing(self, timeout_seconds: float) -> AsyncIterator[int]:
        async with self._lock:
            try:
                if self._epoch is None or self._session != self._connection.welcome.session:
                    await self._acquire(takeover=False, timeout_seconds=timeout_seconds)
                assert self._epoch is not None, "acquired above"
                yield self._epoch
            except RefitdError as error:
                if error.code in _ROLE_LOST:
                    self._forget()
                raise

    async def _acquire(self, *, takeover: bool, timeout_seconds: float) -> None:
        self._forget()
        command = AcquireWriter(takeover=takeover)
        acquired = await self._connection.request(command, WriterAcquired, timeout_seconds=timeout_seconds)
        self._session, self._epoch = self._connection.welcome.session, acquired.epoch

    def _forget(self) -> None:
        self._epoch = None
        self._sources.clear()

    async def _in_place_source(self, shared: SharedModule, epoch: int, timeout_seconds: float) -> int:
        for source in self._sources:
            if source.export() is shared:
                return source.number
        await self._close_dead_sources(epoch, timeout_seconds)
        command = OpenSource(
            epoch=epoch, kind="inplace", segments=shared.memory.segments, tensors=shared.tensors, plan=self._plan
        )
        opened = await self._connection.request(command, SourceOpened, timeout_seconds=timeout_seconds)
        self._sources.append(_Source(opened.source, weakref.ref(shared)))
        return opened.source

    async def _close_dead_sources(self, epoch: int, timeout_seconds: float) -> None:
        """A module that is gone leaves its memory mapped in the daemon until now."""
        for source in [source for source in self._sources if source.export() is None]:
            command = CloseSource(epoch=epoch, source=source.number)
            await self._connection.request(command, SourceClosed, timeout_seconds=timeout_seconds)
            self._sources.remove(source)
