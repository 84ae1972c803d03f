"""The commands of one refit of one daemon, of every kind, in the order in which they may be given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from refit_protocol.messages import (
    AbortRefit,
    ApplyBucket,
    BeginRefit,
    BucketApplied,
    CommitRefit,
    FinishRefit,
    RefitAborted,
    RefitBegan,
    RefitCommitted,
    RefitHeld,
    RefitReport,
    RefitValidated,
    ValidateRefit,
)
from refit_protocol.tensors import SourceTensor, TensorShape
from refit_trainer.backends import Buckets, ExportedMemory
from refit_trainer.connection import Connection
from refit_trainer.errors import DaemonRestarted, DaemonUnreachable, RefitdError
from refit_trainer.refits import CommitOptions
from refit_trainer.writer import WriterRole

if TYPE_CHECKING:
    from refit_trainer.packing import FilledBucket

# A broken connection is soon back; a daemon that is gone for longer has ended our refit by itself.
RECONNECT_SECONDS = 5.0


class DaemonRefit:
    """Between `enter()` and `leave()` no other refit of this session runs. All methods belong to the event loop."""

    def __init__(self, connection: Connection, role: WriterRole, timeout_seconds: float) -> None:
        self._connection = connection
        self._role = role
        self._timeout_seconds = timeout_seconds
        self._entered = False
        self._epoch = 0
        self._source = 0
        self._buckets = 0
        self._number: int | None = None
        self._holding = False
        self._reading: dict[int, asyncio.Task[BucketApplied]] = {}

    @property
    def max_pieces(self) -> int:
        return self._connection.welcome.limits.bucket_pieces

    async def enter(self) -> None:
        self._epoch = await self._role.enter(self._timeout_seconds)
        self._entered = True

    async def leave(self) -> None:
        """Nothing where it was not entered, or was left before."""
        if self._entered:
            self._entered = False
            await self._role.leave()

    async def open(
        self, memory: ExportedMemory, kind: Literal["inplace", "bucket"], tensors: Sequence[SourceTensor]
    ) -> None:
        """The source of what follows; opened the first time."""
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

    async def commit(self, only: list[str] | None, options: CommitOptions) -> RefitReport:
        command = CommitRefit(epoch=self._epoch, source=self._source, only=only, **options)
        committed = await self._connection.request(command, RefitCommitted, timeout_seconds=self._timeout_seconds)
        return committed.report

    async def hold(self, only: list[str] | None, options: CommitOptions) -> RefitHeld:
        """All but published: to be ended by `finish` or `abort`."""
        self._holding = True
        command = CommitRefit(epoch=self._epoch, source=self._source, only=only, hold=True, **options)
        held = await self._connection.request(command, RefitHeld, timeout_seconds=self._timeout_seconds)
        self._number = held.refit
        return held

    # --- buckets ---

    async def begin(
        self, buckets: Buckets, tensors: list[TensorShape], options: CommitOptions, *, partial: bool
    ) -> None:
        await self.open(buckets, "bucket", [])
        self._buckets = len(buckets.views)
        again = self._role.announced(self._source) == tensors
        said = [] if again else tensors
        command = BeginRefit(
            epoch=self._epoch, source=self._source, tensors=said, again=again, partial=partial, **options
        )
        began = await self._connection.request(command, RefitBegan, timeout_seconds=self._timeout_seconds)
        self._number = began.refit
        self._role.note_announced(self._source, tensors)

    async def apply(self, filled: FilledBucket) -> None:
        """Returns when the bucket that is packed next has been read."""
        command = ApplyBucket(epoch=self._epoch, refit=self._under_way, bucket=filled.bucket, pieces=filled.pieces)
        self._reading[filled.bucket] = asyncio.create_task(
            self._connection.request(command, BucketApplied, timeout_seconds=self._timeout_seconds)
        )
        following = self._reading.pop((filled.bucket + 1) % self._buckets, None)
        if following is not None:
            await following

    async def hold_finished(self) -> RefitHeld:
        """The last bucket has been sent: all but published."""
        await self._all_read()
        command = FinishRefit(epoch=self._epoch, refit=self._under_way, hold=True)
        return await self._connection.request(command, RefitHeld, timeout_seconds=self._timeout_seconds)

    # --- the end of a refit that has a number ---

    async def finish(self) -> RefitReport:
        await self._all_read()
        command = FinishRefit(epoch=self._epoch, refit=self._under_way)
        committed = await self._connection.request(command, RefitCommitted, timeout_seconds=self._timeout_seconds)
        self._number = None
        return committed.report

    async def abort(self, error: BaseException) -> None:
        """Nothing if the refit was not begun. The daemon's answer does not matter: `error` is being raised.

        But `DaemonRestarted` is told only once, so it is raised instead.
        """
        self._role.note(error)
        for applied in self._reading.values():
            applied.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        lost = isinstance(error, DaemonUnreachable)
        try:
            await self._abort(error, RECONNECT_SECONDS if lost else self._timeout_seconds)
        except RefitdError as refusal:
            if isinstance(refusal, DaemonRestarted):
                raise

    async def _abort(self, error: BaseException, patience_seconds: float) -> None:
        if self._number is not None:
            command = AbortRefit(epoch=self._epoch, refit=self._number)
            await self._connection.request(command, RefitAborted, timeout_seconds=patience_seconds)
        elif self._holding and not _answered(error):
            # What may be held has no number that we know: the role that it hangs on is given up.
            await self._role.give_up(timeout_seconds=patience_seconds)

    @property
    def _under_way(self) -> int:
        assert self._number is not None, "begin() or hold() comes first"
        return self._number

    async def _all_read(self) -> None:
        for applied in list(self._reading.values()):
            await applied


def _answered(error: BaseException) -> bool:
    return isinstance(error, RefitdError) and error.code is not None
