"""Work that alternates between the caller's thread and the event loop, written once for both clients.

A step-wise function is a generator: it yields coroutines, gets their results back and returns a value. What it does
between two yields (consuming the caller's iterator, copying tensors) happens in the caller's own thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Started:
    """A step that goes on beside what follows: it has begun before the next one does, and that waits for it itself."""

    work: Coroutine[Any, Any, Any]


@dataclass(frozen=True)
class Soon:
    """A step that is done within so many `seconds`, milliseconds: a thread that waits for it stays awake so long, since
    to wake it could take longer than the last steps of the work. Where it sees meanwhile that the work `is_done` but
    for its result, it gets the future of that."""

    work: Coroutine[Any, Any, Any]
    seconds: float
    is_done: Callable[[], bool] | None = None


Step: TypeAlias = Coroutine[Any, Any, Any] | Started | Soon
Steps: TypeAlias = Generator[Step, Any, Result]


class Loop(Protocol):
    """An event loop, seen from another thread."""

    def call(self, work: Coroutine[Any, Any, Result], awake_seconds: float = 0.0) -> Result:
        """What `work` returns or raises; for so long it is waited for awake."""

    def call_until(
        self, work: Coroutine[Any, Any, Result], awake_seconds: float, is_done: Callable[[], bool]
    ) -> Result | Future[Result]:
        """`call`, or the future of it when it `is_done` before; whatever is handed in then comes behind it."""

    def submit(self, work: Coroutine[Any, Any, Any]) -> object:
        """`work` begins before whatever is handed in later."""


def ending(steps: Steps[Result], end: Callable[[BaseException], Coroutine[Any, Any, None]]) -> Steps[Result]:
    """Whatever ends `steps` early, `end` is told of it, and does nothing the second time."""
    try:
        return (yield from steps)
    except BaseException as error:
        try:
            yield end(error)
        except BaseException:
            # Where not even that had begun when it was interrupted.
            yield end(error)
            raise
        raise


async def walk(steps: Steps[Result]) -> Result:
    """Runs the coroutines where this one runs. An error or a cancellation is thrown into the generator."""
    started: list[asyncio.Task[Any]] = []

    async def take(step: Step) -> Any:
        if not isinstance(step, Started):
            return await (step.work if isinstance(step, Soon) else step)
        started.append(asyncio.create_task(step.work))
        await asyncio.sleep(0)
        # What it has started in turn has begun, too: what follows may keep the loop to itself.
        return await asyncio.sleep(0)

    try:
        step = next(steps)
        while True:
            try:
                outcome = await take(step)
            # Whatever ends a step, the generator has to clean up after it.
            except BaseException as error:  # noqa: BLE001
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as done:
        result: Result = done.value
        return result


def _taken(step: Step, loop: Loop) -> Any:
    if isinstance(step, Started):
        loop.submit(step.work)
        return None
    if not isinstance(step, Soon):
        return loop.call(step)
    if step.is_done is None:
        return loop.call(step.work, step.seconds)
    return loop.call_until(step.work, step.seconds, step.is_done)


def walk_blocking(steps: Steps[Result], loop: Loop) -> Result:
    """The same where the coroutines run elsewhere and are waited for. A KeyboardInterrupt, too, comes to the generator
    wherever it finds this: what has been started is cleaned up after."""
    outcome: Any = None
    # Empty again when it is raised: else it would keep, by its traceback, all that the steps hold.
    thrown: list[BaseException] = []
    while True:
        try:
            while True:
                step = steps.throw(thrown.pop()) if thrown else steps.send(outcome)
                outcome = _taken(step, loop)
        except StopIteration as done:
            result: Result = done.value
            return result
        except BaseException as error:
            if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:
                # The generator's own.
                raise
            outcome = None
            thrown.append(error)
