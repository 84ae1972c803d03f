"""A loop that is awake never sleeps, and sleeps again when its time is over or the block is left."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from refit_protocol.awake import awake


class WatchedSelector(selectors.DefaultSelector):
    """Remembers for how long the loop was ready to sleep, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.seconds.append(timeout)
        return super().select(timeout)

    @property
    def slept(self) -> int:
        return sum(seconds is None or seconds > 0 for seconds in self.seconds)


def watched(work: Coroutine[Any, Any, None]) -> WatchedSelector:
    selector = WatchedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(work)
    return selector


async def wait(awake_seconds: float, seconds: float = 0.02) -> None:
    with awake(awake_seconds):
        await asyncio.sleep(seconds)


def test_awake_loop_does_not_sleep() -> None:
    """Through all of a wait that ends in time."""
    selector = watched(wait(awake_seconds=10.0))
    assert selector.slept == 0
    assert len(selector.seconds) > 10


def test_its_time_is_bounded() -> None:
    """A wait that is longer goes on asleep."""
    assert watched(wait(awake_seconds=0.001, seconds=0.5)).slept > 0


def test_no_seconds_change_nothing() -> None:
    """What may not take a core is waited for as ever."""
    assert len(watched(wait(awake_seconds=0.0)).seconds) < 10


def test_left_early_it_is_over() -> None:
    """By an error or otherwise: afterwards the loop sleeps."""

    async def fail_then_wait() -> None:
        with pytest.raises(ValueError, match="inside"), awake(10.0):
            raise ValueError("inside")
        await asyncio.sleep(0.02)

    selector = watched(fail_then_wait())
    assert selector.slept > 0
    assert len(selector.seconds) < 10


def test_meanwhile_something_is_done_again_and_again() -> None:
    """Until the block is left, and where the loop is not awake not at all."""
    calls: list[int] = []

    async def work() -> None:
        enough = asyncio.Event()

        def call() -> None:
            calls.append(len(calls))
            if len(calls) == 10:
                enough.set()

        with awake(0.0, call):
            await asyncio.sleep(0.001)
        assert not calls
        with awake(60.0, call):
            await enough.wait()
        after = len(calls)
        await asyncio.sleep(0.001)
        assert len(calls) == after

    asyncio.run(work())
