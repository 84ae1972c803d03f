"""The replies to one generation as an iterator, for a task on the event loop or for a thread."""

from __future__ import annotations

import asyncio
import queue
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

from refit_protocol.messages import GenerationFinished, GenerationStarted, ResolvedSampling
from refit_trainer.errors import OutputIncomplete, RefitdError, RequestTimedOut
from refit_trainer.inbox import Arrival, Mailbox
from refit_trainer.interruptible import next_of
from refit_trainer.prompts import Incomplete, Reading
from refit_trainer.stream import Delta, Sample, is_cut_off

# What the daemon's own deadline is given beyond, so that its typed error comes before our timeout.
GRACE_SECONDS = 5.0

Item = TypeVar("Item", bound=Delta | Sample)
Result = TypeVar("Result")


def with_grace(deadline_seconds: float | None) -> float | None:
    """How long to wait for a daemon that has this deadline."""
    return None if deadline_seconds is None else max(deadline_seconds, 0.0) + GRACE_SECONDS


class Generations(Protocol):
    """Who runs the generations that iterators read: a connection, or a fleet. Belongs to the event loop."""

    async def cancel(self, request: int | None, *, timeout_seconds: float) -> list[int]: ...

    def abandon(self, request: int) -> None: ...


class OwnThread(Protocol):
    """Where the loop of a client runs that is called from other threads."""

    loop: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[Any, Any, Result]) -> Result: ...


class TaskMailbox:
    """For one consumer on the event loop that fills it, which waits for `wait_seconds` in all, from the first time on;
    with None for ever.

    One timer serves all that: consumers wait once a token.
    """

    def __init__(self, wait_seconds: float | None) -> None:
        self._wait_seconds = wait_seconds
        self._arrived: deque[Arrival] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    def put(self, arrival: Arrival) -> None:
        self._arrived.append(arrival)
        self._wake()

    async def get(self) -> Arrival:
        """Raises TimeoutError."""
        while not self._arrived:
            if self._expired:
                raise TimeoutError
            loop = asyncio.get_running_loop()
            if self._timer is None and self._wait_seconds is not None:
                self._timer = loop.call_later(self._wait_seconds, self._expire)
            self._waiter = loop.create_future()
            await self._waiter
        return self._arrived.popleft()

    def close(self) -> None:
        """Nobody will wait any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self._expired = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ThreadMailbox:
    """For one consumer in another thread."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()

    def put(self, arrival: Arrival) -> None:
        self._arrived.put(arrival)

    def get(self, timeout_seconds: float | None) -> Arrival:
        """Raises TimeoutError."""
        return next_of(self._arrived, timeout_seconds)


class Collected(Generic[Item]):
    """What has arrived and was not taken yet, as the items that the consumer wants.

    `cut_off` holds the outputs that are to be raised: after all that is ready, for what is whole is not to be lost.
    """

    def __init__(self, convert: Callable[[Delta], Item | None], incomplete: Incomplete) -> None:
        self._convert = convert
        self._raises = incomplete == "raise"
        self.ready: deque[Item] = deque()
        self.cut_off: list[Item] = []
        self.resolved: ResolvedSampling | None = None
        self.finished: GenerationFinished | None = None
        self.ended = False

    def take(self, arrival: Arrival) -> None:
        """Raises the error that ended the generation."""
        if isinstance(arrival, list):
            for delta in arrival:
                if (item := self._convert(delta)) is not None:
                    self._take_item(item)
        elif isinstance(arrival, GenerationStarted):
            self.resolved = arrival.resolved
        else:
            self.ended = True
            if isinstance(arrival, RefitdError):
                raise arrival
            self.finished = arrival

    def _take_item(self, item: Item) -> None:
        """The tokens of a stream are delivered in any case."""
        cut_off = self._raises and is_cut_off(item)
        if cut_off:
            self.cut_off.append(item)
        if not cut_off or isinstance(item, Delta):
            self.ready.append(item)


class _Replies(Generic[Item]):
    """`resolved` says what the engine really samples with, `finished` the counts and times; both None until known.

    Closing, or dropping the iterator before its end, cancels what is left.
    """

    def __init__(self, convert: Callable[[Delta], Item | None], reading: Reading) -> None:
        self._collected = Collected(convert, reading.incomplete)
        self._deadline_seconds = reading.deadline_seconds
        self._abandon: Callable[[], object] | None = None

    @property
    def resolved(self) -> ResolvedSampling | None:
        return self._collected.resolved

    @property
    def finished(self) -> GenerationFinished | None:
        return self._collected.finished

    def close(self) -> None:
        """Does nothing to a generation that has ended."""
        self._collected.ended = True
        if self._abandon is not None:
            self._abandon()

    def _check_cut_off(self) -> None:
        """Raises `OutputIncomplete` once, and gives up what is left."""
        cut_off, self._collected.cut_off = self._collected.cut_off, []
        if cut_off:
            self.close()
            raise OutputIncomplete(cut_off)

    def _timed_out(self) -> RequestTimedOut:
        self.close()
        return RequestTimedOut(f"the generation did not end within {self._deadline_seconds:g} s")


class AsyncReplies(_Replies[Item]):
    """Iterated by one task; the request is sent when the iteration begins."""

    def __init__(
        self,
        generations: Generations,
        start: Callable[[Mailbox], Awaitable[int]],
        convert: Callable[[Delta], Item | None],
        reading: Reading,
    ) -> None:
        super().__init__(convert, reading)
        self._generations = generations
        self._start = start
        self._mailbox = TaskMailbox(with_grace(reading.deadline_seconds))
        self._request: int | None = None
        self._cancelled = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        if self._request is None and not self._collected.ended:
            await self._begin()
        while not self._collected.ready:
            self._check_cut_off()
            if self._collected.ended:
                self._mailbox.close()
                raise StopAsyncIteration
            try:
                self._collected.take(await self._mailbox.get())
            except TimeoutError:
                raise self._timed_out() from None
        return self._collected.ready.popleft()

    async def cancel(self) -> None:
        """Ends the outputs that are not finished with `cancelled`; the iteration goes on to its end.

        What was not sent yet is sent and cancelled when the iteration begins, so that every output has its end.
        """
        self._cancelled = True
        if self._request is not None and not self._collected.ended:
            await self._generations.cancel(self._request, timeout_seconds=GRACE_SECONDS)

    async def _begin(self) -> None:
        self._request = await self._start(self._mailbox)
        self._abandon = self._abandoner(self._request)
        if self._cancelled:
            await self.cancel()

    def _abandoner(self, request: int) -> Callable[[], object]:
        generations, mailbox = self._generations, self._mailbox

        def abandon() -> None:
            mailbox.close()
            generations.abandon(request)

        return _abandoner(self, asyncio.get_running_loop(), abandon)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Replies(_Replies[Item]):
    """Iterated by one thread; the request has been sent."""

    def __init__(
        self,
        generation: tuple[Generations, int, ThreadMailbox],
        thread: OwnThread,
        convert: Callable[[Delta], Item | None],
        reading: Reading,
    ) -> None:
        super().__init__(convert, reading)
        self._generations, self._request, self._mailbox = generation
        self._thread = thread
        wait_seconds = with_grace(reading.deadline_seconds)
        self._give_up_at = None if wait_seconds is None else time.monotonic() + wait_seconds
        self._abandon = _abandoner(self, thread.loop, partial(self._generations.abandon, self._request))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        while not self._collected.ready:
            self._check_cut_off()
            if self._collected.ended:
                raise StopIteration
            try:
                self._collected.take(self._mailbox.get(self._seconds_left))
            except TimeoutError:
                raise self._timed_out() from None
        return self._collected.ready.popleft()

    @property
    def _seconds_left(self) -> float | None:
        return None if self._give_up_at is None else max(self._give_up_at - time.monotonic(), 0.0)

    def cancel(self) -> None:
        """Ends the outputs that are not finished with `cancelled`; the iteration goes on to its end."""
        if not self._collected.ended:
            self._thread.call(self._generations.cancel(self._request, timeout_seconds=GRACE_SECONDS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _abandoner(
    replies: _Replies[Item], loop: asyncio.AbstractEventLoop, abandon: Callable[[], None]
) -> Callable[[], object]:
    """Called by hand or by the garbage collector, in whatever thread, at most once."""
    finalizer = weakref.finalize(replies, _call_on_loop, loop, abandon)
    finalizer.atexit = False
    return finalizer


def _call_on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
