"""The commands of one refit of one daemon, of every kind, in the order in which they may be given."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from refit_protocol.awake import awake
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    ApplyBucket,
    BucketApplied,
    CommitRefit,
    Fact,
    FinishRefit,
    PrepareRefit,
    RefitCommitted,
    RefitHeld,
    RefitPrepared,
    RefitReport,
    RefitValidated,
    ValidateRefit,
)
from refit_protocol.tensors import SourceTensor, TensorShape
from refit_trainer.backends import Bell, Buckets, ExportedMemory
from refit_trainer.connection import Connection
from refit_trainer.early_commit import Done, EarlyCommit
from refit_trainer.errors import DaemonRestarted, RefitdError
from refit_trainer.one_refit import OneRefit
from refit_trainer.refits import CommitOptions
from refit_trainer.report import ComingReport
from refit_trainer.report import RefitReport as Report
from refit_trainer.steps import Soon, Started, Steps, ending
from refit_trainer.writer import WriterRole

if TYPE_CHECKING:
    from refit_trainer.packing import Ahead, FilledBucket
    from refit_trainer.sharing import SharedModule

_Fact = TypeVar("_Fact", bound=Fact)

# Longer than a GPU takes to copy what it can hold. A CPU needs its cores for the copy.
AWAKE_SECONDS = {"cuda": 0.025}
# What a daemon knows by number of one source's buckets.
_MAX_LAYOUTS = 4096


class DaemonRefit(OneRefit):
    """A refit from memory that the daemon reads: parameters in place, or buckets."""

    def __init__(self, connection: Connection, role: WriterRole, timeout_seconds: float) -> None:
        super().__init__(connection, role, timeout_seconds)
        self._source = 0
        self._buckets = 0
        self._applied = 0
        self._awake_seconds = 0.0
        self._beginning: asyncio.Task[Any] | None = None
        self._early: EarlyCommit | None = None
        self._reading: dict[int, asyncio.Task[BucketApplied]] = {}
        self._rung = False
        self._done: Done | None = None
        self._is_done = False

    @property
    def max_pieces(self) -> int:
        return self._connection.welcome.limits.bucket_pieces

    @property
    def may_begin_again(self) -> bool:
        return True

    async def open(
        self, memory: ExportedMemory, kind: Literal["inplace", "bucket"], tensors: Sequence[SourceTensor]
    ) -> None:
        """The source of what follows; opened the first time."""
        with self._begins():
            self._source = await self._role.source_of(memory, kind, tensors, timeout_seconds=self._timeout_seconds)

    # --- in place ---

    async def validate(
        self,
        options: CommitOptions,
        *,
        only: list[str] | None = None,
        tensors: Sequence[TensorShape] = (),
        partial: bool = False,
    ) -> RefitValidated:
        """A dry run: `only` for a source that is read in place, the others for buckets."""
        command = ValidateRefit(
            epoch=self._epoch, source=self._source, only=only, tensors=list(tensors), partial=partial, **options
        )
        return await self._connection.request(command, RefitValidated, timeout_seconds=self._timeout_seconds)

    async def commit(self, only: list[str] | None, options: CommitOptions, release: int | None = None) -> RefitReport:
        command = CommitRefit(epoch=self._epoch, source=self._source, only=only, release=release, **options)
        with self._begins():
            committed = await self._connection.request(command, RefitCommitted, timeout_seconds=self._timeout_seconds)
        return committed.report

    async def in_place(self, shared: SharedModule, only: list[str] | None, options: CommitOptions) -> RefitReport:
        """All of a refit that nothing ends early; in one, since every change of threads takes its time."""
        await self.enter()
        await self.open(shared.memory, "inplace", shared.tensors)
        with self._attentive(shared):
            report = await self.commit(only, options)
        await self.leave()
        return report

    async def begin_early(self, shared: SharedModule, only: list[str] | None, options: CommitOptions) -> None:
        """Sends a commit that is to be released, where the daemon would wait for that; `begun_early` tells, then comes
        `committed`."""
        self._beginning = asyncio.current_task()
        self._early = await self._sent_early(shared, only, options)

    def ring(self, shared: SharedModule, only: list[str] | None, options: CommitOptions) -> None:
        """Starts the copy of a refit like this one if it stands by. On the thread that has enqueued the writes, behind
        `begin_early`, and the commit has to follow."""
        bell = self._role.standing_bell(shared.memory)
        alike = only is None and options.get("version") is None and not options.get("check_finite")
        # Behind another refit the commit would not come before that has ended, which would wait for it at the daemon.
        if bell is not None and alike and self._connection.is_up and (self._entered or self._role.claim(self)):
            # It may be interrupted in its middle.
            self._rung = True
            self._rung = bell.ring_awaited()
            if not self._rung:
                self._role.waive(self)

    def make_bell_ready(self, shared: SharedModule) -> None:
        """On the thread that will ring it; what takes time the first time."""
        if (bell := self._role.standing_bell(shared.memory)) is not None:
            bell.make_ready()

    @property
    def early(self) -> EarlyCommit | None:
        """Once there is one; for any thread."""
        return self._early

    async def begun_early(self) -> EarlyCommit | None:
        """None, and nothing has happened, where the daemon would not wait."""
        assert self._beginning is not None, "begin_early() comes first"
        await self._beginning
        return self._early

    async def _sent_early(
        self, shared: SharedModule, only: list[str] | None, options: CommitOptions
    ) -> EarlyCommit | None:
        # Without a connection it could only wait for one, and so would what the look may find.
        if not self._connection.is_up or self._role.release_of(shared.memory) is None:
            return None
        await self.enter()
        await self.open(shared.memory, "inplace", shared.tensors)
        # Another daemon may have come meanwhile, with another bell.
        released = self._role.release_of(shared.memory)
        if released is None:
            await self.leave()
            return None
        word, workers = released
        number = word.following()
        return EarlyCommit(word, Done(word, number, workers), asyncio.create_task(self.commit(only, options, number)))

    async def committed(self, shared: SharedModule) -> RefitReport:
        """What was begun early, and released. Not before is the loop awake: it would take turns with the thread that
        looks."""
        early = self._early
        assert early is not None, "begin_early() comes first"
        self._done = early.done
        async with self._ending_what_is_done():
            with self._attentive(shared):
                report = await early.committed()
        await self.leave()
        return report

    def is_done(self) -> bool:
        """Whether every worker has said by its bell that it holds the weights whose commit has been asked for: then
        only the answer is to come, and whatever that is, this one ends it. For any thread."""
        self._is_done = self._done is not None and self._done.is_told()
        # It may have failed since, and have found that somebody else would end it.
        return self._is_done and self._done is not None

    def coming(self, answer: Future[Any]) -> ComingReport:
        return ComingReport(answer)

    @contextlib.asynccontextmanager
    async def _ending_what_is_done(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            # Else whoever has begun it does that; it is not seen to be done from here on.
            self._done = None
            if self._is_done:
                await self.end(error)
            raise

    async def prepare(
        self, shared: SharedModule, only: list[str] | None, options: CommitOptions, hold_seconds: float | None
    ) -> RefitPrepared:
        """To be ended by `publish_prepared`, `withdraw` or `end`; others of this session are refused meanwhile."""
        await self.enter()
        await self.open(shared.memory, "inplace", shared.tensors)
        command = PrepareRefit(epoch=self._epoch, source=self._source, only=only, hold_seconds=hold_seconds, **options)
        with self._begins():
            prepared = await self._connection.request(command, RefitPrepared, timeout_seconds=self._timeout_seconds)
        self._number = prepared.refit
        await self.leave()
        return prepared

    async def publish_prepared(self) -> RefitReport:
        """Waits for no other refit of this session, which may be waiting for this one. Raises `unknown_refit` where it
        has ended."""
        if self._number is None or not self._role.holds(self._epoch):
            raise RefitdError("the refit was withdrawn, or the writer's role lost", code=ErrorCode.UNKNOWN_REFIT)
        return await self.finish()

    async def withdraw(self) -> None:
        """Nothing if it is over already. Needs no role: a daemon to which we are the writer no more has ended it."""
        if self._number is not None:
            await self._abort_begun(self._number, self._timeout_seconds)

    @property
    def bell(self) -> Bell | None:
        return self._role.bell_of(self._source)

    def _attentive(self, shared: SharedModule) -> AbstractContextManager[None]:
        return self._connection.attentive(awake_seconds(shared))

    async def hold(self, only: list[str] | None, options: CommitOptions) -> RefitHeld:
        """All but published: to be ended by `finish` or `abort`."""
        command = CommitRefit(epoch=self._epoch, source=self._source, only=only, hold=True, **options)
        with self._begins():
            held = await self._connection.request(command, RefitHeld, timeout_seconds=self._timeout_seconds)
        self._number = held.refit
        return held

    # --- buckets ---

    async def begin(
        self,
        buckets: Buckets,
        tensors: list[TensorShape],
        options: CommitOptions,
        *,
        partial: bool,
        ahead: Ahead | None = None,
    ) -> None:
        """Buckets that are packed `ahead` are sent without the answer where the daemon knows what they hold. Returns
        when the one that is packed next has been read."""
        await self.open(buckets, "bucket", [])
        self._buckets = len(buckets.views)
        self._awake_seconds = AWAKE_SECONDS.get(buckets.views[0].device.type, 0.0)
        again = self._role.announces_again(self._source, tensors)
        with awake(self._awake_seconds):
            began = asyncio.create_task(self._begin(self._source, tensors, options, partial=partial))
            try:
                if not again:
                    await began
                filled = [] if ahead is None else await ahead()
                for bucket in filled:
                    self._send(bucket)
                await began
            except BaseException:
                began.cancel()
                await asyncio.gather(began, return_exceptions=True)
                raise
            if filled:
                await self._following_read(filled[-1])

    async def apply(self, filled: FilledBucket) -> None:
        """Returns when the bucket that is packed next has been read."""
        self._send(filled)
        with awake(self._awake_seconds):
            await self._following_read(filled)

    def _send(self, filled: FilledBucket) -> None:
        self._reading[filled.bucket] = asyncio.create_task(self._apply(self._applied, filled))
        self._applied += 1

    async def _following_read(self, filled: FilledBucket) -> None:
        """At once behind the last one: the end is sent while it and those before it are still being read."""
        if filled.is_last:
            return
        following = self._reading.pop((filled.bucket + 1) % self._buckets, None)
        if following is not None:
            await following

    async def _apply(self, number: int, filled: FilledBucket) -> BucketApplied:
        """The `number`th bucket of this refit. What it holds is said only where it was not the same the last time."""
        known = self._role.layouts_of(self._source)
        # Unknown until it is answered: the daemon may have taken what it is told before.
        again = (before := known.pop(number, None)) is not None and before.holds_the_same(filled)
        command = ApplyBucket(
            epoch=self._epoch,
            refit=self._number,
            bucket=filled.bucket,
            pieces=[] if again else filled.pieces,
            layout=number if number < _MAX_LAYOUTS else None,
        )
        applied = await self._go_on(command, BucketApplied)
        if number < _MAX_LAYOUTS and applied.size_bytes:
            known[number] = filled
        return applied

    async def hold_finished(self) -> RefitHeld:
        """The last bucket has been sent: all but published."""
        return await self._finished(FinishRefit(epoch=self._epoch, refit=self._under_way, hold=True), RefitHeld)

    # --- the end of a refit that has a number ---

    async def finish(self) -> RefitReport:
        done = self._done = self._role.following_done(self._source)
        command = FinishRefit(epoch=self._epoch, refit=self._under_way, done=None if done is None else done.number)
        async with self._ending_what_is_done():
            with awake(self._awake_seconds):
                committed = await self._finished(command, RefitCommitted)
        self._number = None
        return committed.report

    async def abort(self, error: BaseException) -> None:
        """Raises `DaemonRestarted` where only what was on its way was told of it."""
        tasks: list[asyncio.Task[Any]] = [*self._reading.values()]
        for applied in tasks:
            applied.cancel()
        try:
            tasks += await self._end_early()
            if self._rung and self._early is None and not self._unanswered:
                # What was copied may have no commit: once the role is given up it is put back, or torn.
                self._role.doubt()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._role.waive(self)
            await super().abort(error)
        for failure in (task.exception() for task in tasks if not task.cancelled()):
            # It is told once, whoever is told.
            if isinstance(failure, DaemonRestarted) and failure is not error:
                raise failure

    async def _end_early(self) -> list[asyncio.Task[Any]]:
        """What has been ended."""
        ended: list[asyncio.Task[Any]] = []
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.wait([self._beginning])
            ended.append(self._beginning)
        if self._early is not None:
            await self._early.end()
            ended.append(self._early.committing)
        return ended

    @property
    def _under_way(self) -> int:
        assert self._number is not None, "begin() or hold() comes first"
        return self._number

    async def _finished(self, command: FinishRefit, expected: type[_Fact]) -> _Fact:
        """Sent behind the last bucket, whose answer it does not wait for. What a bucket failed with goes first: the end
        of that refit then fails, too."""
        finishing = asyncio.create_task(self._go_on(command, expected))
        try:
            for applied in list(self._reading.values()):
                await applied
            return await finishing
        except BaseException:
            finishing.cancel()
            await asyncio.gather(finishing, return_exceptions=True)
            raise


def awake_seconds(shared: SharedModule) -> float:
    """How long the end of a refit in place is waited for awake."""
    return AWAKE_SECONDS.get(shared.device.type, 0.0)


def refit_in_place(
    refit: DaemonRefit, shared: SharedModule, only: list[str] | None, options: CommitOptions
) -> Steps[Report]:
    """One message, once the source is open; the module's memory may be written again when this returns or raises.

    On the thread that has enqueued the writes; where the daemon waits for it, that looks at the module while the
    message is on its way. Raises `NotShareable`.
    """
    return (yield from ending(_in_place(refit, shared, only, options), refit.end))


def _in_place(
    refit: DaemonRefit, shared: SharedModule, only: list[str] | None, options: CommitOptions
) -> Steps[Report]:
    yield Started(refit.begin_early(shared, only, options))
    refit.ring(shared, only, options)
    shared.require_in_place()
    shared.memory.synchronise()
    early: EarlyCommit | None = refit.early or (yield refit.begun_early())
    if early is not None:
        early.release()
    if early is None:
        report: Report = yield Soon(refit.in_place(shared, only, options), awake_seconds(shared))
        refit.make_bell_ready(shared)
        return report
    outcome = yield Soon(refit.committed(shared), awake_seconds(shared), refit.is_done)
    return refit.coming(outcome) if isinstance(outcome, Future) else outcome
