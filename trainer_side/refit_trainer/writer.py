"""The writer's role of a session: one refit at a time, and the sources that the daemon has open for us."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
from refit_trainer.backends import Bell, ExportedMemory
from refit_trainer.connection import Connection
from refit_trainer.early_commit import Done, ReleaseWord
from refit_trainer.errors import DaemonRestarted, DaemonUnreachable, RefitdError, RequestTimedOut

if TYPE_CHECKING:
    from refit_trainer.packing import FilledBucket

# A broken connection is soon back; a daemon that is gone for longer has ended our refit by itself.
RECONNECT_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.001
# After these the daemon no longer knows our role or our sources; the next refit starts over.
_ROLE_LOST = frozenset({ErrorCode.STALE_EPOCH, ErrorCode.UNKNOWN_SOURCE, ErrorCode.NO_SESSION})


@dataclass(frozen=True)
class _Source:
    """`memory` is weak: what the trainer has dropped is closed at the next occasion, not kept."""

    number: int
    kind: Literal["inplace", "bucket"]
    memory: weakref.ref[ExportedMemory]
    bell: Bell | None
    releases: bool
    workers: int


class WriterRole:
    """A second refit waits for the first. Belongs to the event loop of the connection."""

    def __init__(self, connection: Connection, plan: PlanMode | None, *, stand_by: bool = False) -> None:
        self._connection = connection
        self._plan = plan
        self._stand_by = stand_by
        self._lock = asyncio.Lock()
        self._session = ""
        self._epoch: int | None = None
        self._sources: list[_Source] = []
        self._announced: dict[int, list[TensorShape]] = {}
        self._layouts: dict[int, dict[int, FilledBucket]] = {}
        self._is_in_doubt = False
        self._next: object | None = None

    async def acquire(self, *, takeover: bool, timeout_seconds: float) -> None:
        async with self._turn(timeout_seconds):
            await self._acquire(takeover=takeover, timeout_seconds=timeout_seconds)

    async def release(self, *, timeout_seconds: float) -> None:
        """Gives the role up; the daemon closes our sources with it."""
        async with self._turn(timeout_seconds):
            await self.give_up(timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """The session is over, and the daemon has closed our sources with it."""
        self._forget()

    async def give_up(self, *, timeout_seconds: float, reconnect_seconds: float | None = None) -> None:
        """`release` inside `enter()` and `leave()`.

        What the daemon does for a command that it has not answered has no number by which it could be aborted, but it
        hangs on the role: after this nothing of it waits any more, and none of our memory is read.
        """
        self._forget()
        # Until it is answered: the role that is asked for meanwhile would be given up by it.
        self._is_in_doubt = True
        await self._connection.request(
            ReleaseWriter(), WriterReleased, timeout_seconds=timeout_seconds, reconnect_seconds=reconnect_seconds
        )
        self._is_in_doubt = False

    def doubt(self) -> None:
        """Nobody knows whether what was begun has ended: the role is given up before it is entered the next time."""
        self._is_in_doubt = True

    async def end_unanswered(self, error: BaseException, *, timeout_seconds: float) -> None:
        """Inside `enter()` and `leave()`, or by a rank that lends its memory to the writer's refit: to be told what a
        command failed with, or why its answer is not waited for."""
        self.note(error)
        if not is_answer(error):
            patience_seconds = patience(error, timeout_seconds)
            with unless_restarted():
                await self.give_up(timeout_seconds=patience_seconds, reconnect_seconds=RECONNECT_SECONDS)

    @contextlib.asynccontextmanager
    async def writing(self, timeout_seconds: float) -> AsyncIterator[int]:
        """For one command: yields the epoch that it carries. Whoever does not wait for its answer ends it."""
        epoch = await self.enter(timeout_seconds)
        try:
            yield epoch
        except BaseException as error:
            await self.end_unanswered(error, timeout_seconds=timeout_seconds)
            raise
        finally:
            await self.leave()

    async def enter(self, timeout_seconds: float, claimant: object | None = None) -> int:
        """The epoch, in which nothing is under way that was given up before."""
        await self._take_turn(claimant, timeout_seconds)
        try:
            if self._is_in_doubt:
                await self.give_up(timeout_seconds=timeout_seconds)
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

    def claim(self, claimant: object) -> bool:
        """Whether it will be the next to enter, whoever comes meanwhile: then it has to, or to waive that. For any
        thread."""
        if self._next is None:
            # Before the look: whoever enters looks at this behind it, so one of the two sees the other.
            self._next = claimant
        if self._lock.locked():
            self.waive(claimant)
        return self._next is claimant

    def waive(self, claimant: object) -> None:
        """Nothing where it has not claimed. For any thread."""
        if self._next is claimant:
            self._next = None

    def holds(self, epoch: int) -> bool:
        """False where it is known to have been lost since this epoch was entered."""
        return self._epoch == epoch and self._session == self._connection.welcome.session

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
        bell = memory.bell()
        command = OpenSource(
            epoch=self._written_epoch,
            kind=kind,
            segments=memory.segments,
            tensors=list(tensors),
            plan=self._plan,
            bell=None if bell is None else bell.segment,
            stand_by=self._stand_by and kind == "inplace" and bell is not None,
        )
        opened = await self._connection.request(command, SourceOpened, timeout_seconds=timeout_seconds)
        self._sources.append(_Source(opened.source, kind, weakref.ref(memory), bell, opened.release, opened.workers))
        return opened.source

    def bell_of(self, number: int) -> Bell | None:
        """Of an open source."""
        return next((source.bell for source in self._sources if source.number == number), None)

    def standing_bell(self, memory: ExportedMemory) -> Bell | None:
        """Of its open source, where refits from it may stand by, and the next one has nothing to give up first. For any
        thread."""
        if not self._stand_by or self._is_in_doubt:
            return None
        return next((source.bell for source in self._sources if source.memory() is memory), None)

    def release_of(self, memory: ExportedMemory) -> tuple[ReleaseWord, int] | None:
        """Where it is open, and commits from it may wait to be released; with the number of workers that do."""
        found = next((source for source in self._sources if source.memory() is memory), None)
        if found is None or found.bell is None or not found.releases:
            return None
        return found.bell.release, found.workers

    def following_done(self, number: int) -> Done | None:
        """What the workers are to tell of the next refit from a source of buckets; None where they cannot."""
        found = next((source for source in self._sources if source.number == number), None)
        if found is None or found.kind != "bucket" or found.bell is None or not found.releases:
            return None
        word = found.bell.release
        return Done(word, word.following(), found.workers)

    def announces_again(self, source: int, tensors: list[TensorShape]) -> bool:
        """Whether the last refit from this source was begun with the same."""
        return self._announced.get(source) == tensors

    def take_announced(self, source: int) -> list[TensorShape] | None:
        """What the last refit from this source was begun with; unknown from here on, until a begin is answered."""
        return self._announced.pop(source, None)

    def note_announced(self, source: int, tensors: list[TensorShape], *, again: bool) -> None:
        self._announced[source] = tensors
        if not again:
            self._layouts.pop(source, None)

    def layouts_of(self, source: int) -> dict[int, FilledBucket]:
        """What the daemon knows by number of how this source's buckets are filled."""
        return self._layouts.setdefault(source, {})

    @contextlib.asynccontextmanager
    async def _turn(self, timeout_seconds: float) -> AsyncIterator[None]:
        await self._take_turn(None, timeout_seconds)
        try:
            yield
        finally:
            self._lock.release()

    async def _take_turn(self, claimant: object | None, timeout_seconds: float) -> None:
        """Raises `RequestTimedOut`, as where an iterator that a refit reads asks its own client for the role."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._turn_has_come(claimant)
        except TimeoutError:
            raise RequestTimedOut(f"another refit of this client has not ended in {timeout_seconds:g} s") from None

    async def _turn_has_come(self, claimant: object | None) -> None:
        await self._lock.acquire()
        while self._next is not None and self._next is not claimant:
            self._lock.release()
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            await self._lock.acquire()
        self.waive(claimant)

    @property
    def _written_epoch(self) -> int:
        assert self._epoch is not None, "only inside enter() and leave()"
        return self._epoch

    async def _acquire(self, *, takeover: bool, timeout_seconds: float) -> None:
        command = AcquireWriter(takeover=takeover)
        try:
            acquired = await self._connection.request(command, WriterAcquired, timeout_seconds=timeout_seconds)
        except RefitdError as error:
            if error.code is not None:
                self._forget()
            raise
        granted = self._connection.welcome.session, acquired.epoch
        if granted != (self._session, self._epoch):
            self._forget()
        self._session, self._epoch = granted

    def _forget(self) -> None:
        self._epoch = None
        self._sources.clear()
        self._announced.clear()
        self._layouts.clear()

    async def _close_dead_sources(self, timeout_seconds: float) -> None:
        for source in [source for source in self._sources if source.memory() is None]:
            command = CloseSource(epoch=self._written_epoch, source=source.number)
            await self._connection.request(command, SourceClosed, timeout_seconds=timeout_seconds)
            self._sources.remove(source)
            self._announced.pop(source.number, None)
            self._layouts.pop(source.number, None)


def is_answer(error: BaseException) -> bool:
    """Whether the daemon that was asked does nothing for the command any more: it has refused it, or is gone."""
    return isinstance(error, RefitdError) and (error.code is not None or isinstance(error, DaemonRestarted))


def patience(error: BaseException, timeout_seconds: float) -> float:
    """How long to wait for the daemon after `error`."""
    return RECONNECT_SECONDS if isinstance(error, DaemonUnreachable) else timeout_seconds


@contextlib.contextmanager
def unless_restarted() -> Iterator[None]:
    """For what is said while another error is being raised: of its own errors only `DaemonRestarted`, which is told
    only once, takes that one's place."""
    try:
        yield
    except RefitdError as failure:
        if isinstance(failure, DaemonRestarted):
            raise
