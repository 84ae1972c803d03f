"""Work that alternates between the caller's thread and the event loop, written once for both clients.

A step-wise function is a generator: it yields coroutines, gets their results back and returns a value. What it does
between two yields (consuming the caller's iterator, copying tensors) happens in the caller's own thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Started:
    """A step that goes on beside what follows: it has begun before the next one does, and that waits for it itself."""

    work: Coroutine[Any, Any, Any]


Steps: TypeAlias = Generator[Coroutine[Any, Any, Any] | Started, Any, Result]


class Loop(Protocol):
    """An event loop, seen from another thread."""

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` returns or raises."""

    def submit(self, work: Coroutine[Any, Any, Any]) -> object:
        """`work` begins before whatever is handed in later."""


async def walk(steps: Steps[Result]) -> Result:
    """Runs the coroutines where this one runs. An error or a cancellation is thrown into the generator."""
    started: list[asyncio.Task[Any]] = []

    async def take(step: Coroutine[Any, Any, Any] | Started) -> Any:
        if not isinstance(step, Started):
            return await step
        started.append(asyncio.create_task(step.work))
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


def walk_blocking(steps: Steps[Result], loop: Loop) -> Result:
    """The same where the coroutines run elsewhere and are waited for."""
    try:
        step = next(steps)
        while True:
            try:
                outcome = None
                if isinstance(step, Started):
                    loop.submit(step.work)
                else:
                    outcome = loop.call(step)
            # Also a KeyboardInterrupt: the generator has to clean up after it.
            except BaseException as error:  # noqa: BLE001
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as done:
        result: Result = done.value
        return result
