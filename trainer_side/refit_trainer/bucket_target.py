"""A refit through buckets as whoever reads them sees it: begun, applied bucket by bucket, and finished."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias, TypeVar

from refit_protocol.tensors import TensorShape
from refit_trainer.backends import Buckets
from refit_trainer.errors import RefitdError
from refit_trainer.packing import Ahead, FilledBucket
from refit_trainer.refits import CommitOptions
from refit_trainer.steps import Soon, Steps

_Report = TypeVar("_Report")
_Answer = TypeVar("_Answer", covariant=True)

Begin: TypeAlias = Callable[..., Coroutine[Any, Any, None]]
"""`BucketTarget.begin`, but for its buckets."""


class BucketTarget(Protocol[_Answer]):
    """Who reads the buckets: one daemon, or several that map the same ones."""

    @property
    def max_pieces(self) -> int:
        """In one bucket."""

    @property
    def may_begin_again(self) -> bool:
        """Whether it can be entered and begun anew when it was aborted."""

    async def enter(self) -> None: ...

    async def begin(
        self,
        buckets: Buckets,
        tensors: list[TensorShape],
        options: CommitOptions,
        *,
        partial: bool,
        ahead: Ahead,
    ) -> None:
        """Everything announced is validated, the gate shuts, and what is packed `ahead`, which may still be to come, is
        applied: returns when the bucket that is packed next has been read."""

    async def apply(self, filled: FilledBucket) -> None:
        """Returns when the bucket that is packed next has been read."""

    async def finish(self) -> _Answer: ...

    def is_done(self) -> bool:
        """Once it is being finished: whether it has all been read and taken, and only the answer is still to come. What
        that is concerns nobody else from then on. For any thread."""

    def coming(self, answer: Future[Any]) -> _Answer:
        """For what `is_done`."""

    async def abort(self, error: BaseException) -> None:
        """`error` is what ends the refit, and will be raised."""

    async def leave(self) -> None:
        """Nothing where it was not entered, or was left before."""


class Beginning:
    """Of one refit, from `buckets`: the role is taken and the gate shut, before the first buckets are packed or after.
    Its coroutines belong to the loop."""

    def __init__(self, target: BucketTarget[Any], begin: Begin) -> None:
        self._target = target
        self._begin = begin
        self._filled: Sequence[FilledBucket] = ()
        self._is_entered = False
        self._is_ended = False
        self._is_packed = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self.buckets: Buckets | None = None

    async def start(self) -> None:
        """To be gone on with; ends when the refit has begun."""
        self._task = asyncio.current_task()
        await self._run()

    async def go_on(self, filled: Sequence[FilledBucket]) -> None:
        """The first buckets are packed. Returns when the refit has begun and one of them has been read."""
        self._filled = filled
        self._is_packed.set()
        await (self._run() if self._task is None else self._task)

    async def take_back(self) -> None:
        """Of what was started, if anything was; nothing is packed for it. Returns when the target can be told to
        abort what has begun, or has refused what it was begun for. Raises what would be refused just as well when it is
        begun anew."""
        if self._task is None:
            return
        try:
            await self.go_on(())
        except RefitdError as refused:
            if refused.code is None or refused.retryable:
                raise

    async def enter(self) -> None:
        await self._target.enter()
        self._is_entered = True

    async def _run(self) -> None:
        if not self._is_entered:
            await self.enter()
        await self._begin(self.buckets, ahead=self._packed)

    async def _packed(self) -> Sequence[FilledBucket]:
        await self._is_packed.wait()
        return self._filled

    async def end(self, error: BaseException) -> None:
        """Early, once; the target may have been entered by the time that its caller was interrupted."""
        if self._is_ended:
            return
        self._is_ended = True
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
        finally:
            try:
                await self._target.abort(error)
            finally:
                await self._target.leave()


def sent(target: BucketTarget[_Report], packed: Iterable[FilledBucket], awake_seconds: float) -> Steps[_Report]:
    """Each answer is waited for awake, for so long."""
    for filled in packed:
        yield Soon(target.apply(filled), awake_seconds)
    outcome = yield Soon(_finished(target), awake_seconds, target.is_done)
    report: _Report = target.coming(outcome) if isinstance(outcome, Future) else outcome
    return report


async def _finished(target: BucketTarget[_Report]) -> _Report:
    report = await target.finish()
    await target.leave()
    return report
