"""Work that alternates between the caller's thread and the event loop, written once for both clients.

A step-wise function is a generator: it yields coroutines, gets their results back and returns a value. What it does
between two yields (consuming the caller's iterator, copying tensors) happens in the caller's own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeAlias, TypeVar

Result = TypeVar("Result")
Steps: TypeAlias = Generator[Coroutine[Any, Any, Any], Any, Result]


async def walk(steps: Steps[Result]) -> Result:
    """Runs the coroutines where this one runs. An error or a cancellation is thrown into the generator."""
    try:
        step = next(steps)
        while True:
            try:
                outcome = await step
            # Whatever ends a step, the generator has to clean up after it.
            except BaseException as error:  # noqa: BLE001
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as done:
        result: Result = done.value
        return result


def walk_blocking(steps: Steps[Result], call: Callable[[Coroutine[Any, Any, Any]], Any]) -> Result:
    """The same where `call` runs a coroutine elsewhere and waits for it."""
    try:
        step = next(steps)
        while True:
            try:
                outcome = call(step)
            # Also a KeyboardInterrupt: the generator has to clean up after it.
            except BaseException as error:  # noqa: BLE001
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as done:
        result: Result = done.value
        return result
