"""The window that stays open between the messages of a refit, and every way it is left.

Its trainer finishes or aborts, or is too late, or loses the writer's role, or something fails, or the daemon stops:
whichever comes first ends the refit, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from refit_protocol.errors import ProtocolError
from refitd.commit import Commit
from refitd.config import RefitConfig
from refitd.engine import Engine
from refitd.in_place import ended_with_writes
from refitd.open_refit import OpenRefit, unknown_refit
from refitd.running import Running
from refitd.sessions import Session
from refitd.sources import Sources
from refitd.worker_error import WorkerError
from refitd.writer import Writer

STOPPING = "the daemon is shutting down"

log = structlog.get_logger()


class OpenWindow:
    """`refit` is the one whose window is open, if any is. Belongs to the event loop's thread."""

    def __init__(
        self, config: RefitConfig, engine: Engine, commit: Commit, writer: Writer, sources: Sources, running: Running
    ) -> None:
        self._config = config
        self._engine = engine
        self._commit = commit
        self._writer = writer
        self._sources = sources
        self._running = running
        self.refit: OpenRefit | None = None
        self._ending: OpenRefit | None = None

    @asynccontextmanager
    async def opened(self, refit: OpenRefit) -> AsyncIterator[None]:
        """The window stays open behind the body, unless that raises. Raises `unknown_refit` if it may not stay open."""
        await self.enter(refit)
        try:
            yield
        except BaseException as error:
            await self.end(refit, error)
            raise
        await self._leave_open(refit)

    async def enter(self, refit: OpenRefit) -> None:
        window = self._commit.window(refit.ticket)
        await window.__aenter__()
        refit.window = window
        self.refit = refit

    async def _leave_open(self, refit: OpenRefit) -> None:
        """The window waits, not for ever, for its session's next message. Raises `unknown_refit` if none may come."""
        self.require(refit)
        self.watch(refit)
        if self._commit.is_draining:
            await self.abort(refit, STOPPING)
        elif refit.session.closed or self._writer.session is not refit.session:
            await self.abort(refit, "its session is the writer no more")
        self.require(refit)

    def watch(self, refit: OpenRefit) -> None:
        """From now on it may stay open for as long as its patience lasts."""
        refit.unwatch()
        refit.watch(self._running.run(self._abort_at_deadline(refit)))

    def under_way(self, session: Session, epoch: int, refit_id: int) -> OpenRefit:
        """For the writer. Raises `stale_epoch`, `unknown_refit`."""
        self._writer.check(session, epoch)
        refit = self.refit
        if refit is None or refit.id != refit_id:
            raise unknown_refit(refit_id)
        return refit

    def is_writers(self, session: Session) -> bool:
        """Whether nobody else may open it now."""
        return self._writer.session is session

    def require(self, refit: OpenRefit) -> None:
        """Raises `unknown_refit` where it has been ended meanwhile."""
        if self.refit is not refit:
            raise unknown_refit(refit.id)

    async def abort(self, refit: OpenRefit, why: str, *, meant: bool = False) -> bool:
        """Whether there was anything to abort: it may have waited behind the end. `meant`: by its trainer."""
        async with refit.order:
            if self.refit is not refit:
                return False
            await self.end(refit, await self._aborted(refit, why, meant=meant))
            return True

    async def _aborted(self, refit: OpenRefit, why: str, *, meant: bool) -> ProtocolError:
        """What the window is to be left with."""
        # To the workers a held refit is finished.
        wrote = refit.held is not None
        try:
            # On a task of its own, as each bucket is: it must not overtake one.
            wrote = await self._running.run(ended_with_writes(self._engine, self._config)) or wrote
            return self._commit.failure(f"refit {refit.id} was aborted: {why}", wrote=wrote, meant=meant)
        except WorkerError as refused:
            refused.wrote = refused.wrote or wrote
            return refused
        except ProtocolError as unreachable:
            return unreachable

    async def _abort_at_deadline(self, refit: OpenRefit) -> None:
        patience_seconds = refit.patience_seconds
        await asyncio.sleep(patience_seconds)
        await self.abort(refit, f"not finished within {patience_seconds:g} s")

    async def let_go(self, session: Session, why: str) -> None:
        """Comes back when no window of this session is open."""
        refit = self.refit
        if refit is not None and refit.session is session:
            await self.abort(refit, why)
        if self._ending is not None and self._ending.session is session:
            # Else the next writer would find the gate still shut.
            await self._ending.ended.wait()

    @asynccontextmanager
    async def ended_by_failure(self, refit: OpenRefit) -> AsyncIterator[None]:
        """What the body is refused with ends the refit."""
        try:
            yield
        except ProtocolError as error:
            await self.end(refit, error)
            raise

    async def end(self, refit: OpenRefit, error: BaseException | None) -> None:
        """Leaves the window exactly once, with the error that ended it."""
        if self.refit is not refit:
            return
        self.refit, self._ending = None, refit
        refit.unwatch()
        try:
            if error is not None and refit.reception == "under way":
                await self._end_reception(refit)
            assert refit.window is not None
            swallowed = await refit.window.__aexit__(type(error) if error else None, error, None)
            assert not swallowed
        finally:
            self._ending = None
            refit.ended.set()

    async def _end_reception(self, refit: OpenRefit) -> None:
        """Before the window is left: the next broadcast may be arriving in the very parameters that are put back."""
        try:
            await self._sources.close(refit.source)
        # The window knows what to do: the engine is dead, or its workers refuse to put anything back.
        except ProtocolError as failure:
            log.error("the broadcasts could not be ended", refit=refit.id, reason=failure.message)
