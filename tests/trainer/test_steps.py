"""Work that alternates between a caller and an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from refit_trainer.client import LoopThread
from refit_trainer.steps import Soon, Started, Steps, walk, walk_blocking

Walk = Callable[[Steps[Any]], Any]


def blocking(steps: Steps[Any]) -> Any:
    thread = LoopThread()
    try:
        return walk_blocking(steps, thread)
    finally:
        thread.stop()


def on_loop(steps: Steps[Any]) -> Any:
    return asyncio.run(walk(steps))


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def forever() -> None:
    await asyncio.Event().wait()


async def failing() -> None:
    raise ValueError("a step failed")


@pytest.mark.parametrize("walk_it", [blocking, on_loop])
def test_results_come_back_into_the_generator(walk_it: Walk) -> None:
    """What a step returns is what its yield gives."""

    def steps() -> Steps[list[int]]:
        first = yield doubled(1)
        second = yield doubled(first)
        return [first, second]

    assert walk_it(steps()) == [2, 4]


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 30.0])
@pytest.mark.parametrize("walk_it", [blocking, on_loop])
def test_a_step_that_is_due_soon_is_one_like_any_other(walk_it: Walk, seconds: float) -> None:
    """Its result or its error comes back, also where it takes longer."""

    def steps() -> Steps[int]:
        try:
            yield Soon(failing(), seconds)
        except ValueError:
            return (yield Soon(doubled(2), seconds))
        return 0

    assert walk_it(steps()) == 4


def test_a_step_that_is_done_but_for_its_result_is_not_waited_for() -> None:
    """A thread gets the future of it, and whatever it hands in later comes behind."""
    may_end = asyncio.Event()
    order: list[str] = []

    async def ending() -> str:
        await may_end.wait()
        order.append("ended")
        return "the result"

    async def behind() -> None:
        order.append("behind")

    def steps() -> Steps[Any]:
        return (yield Soon(ending(), 30.0, lambda: True))

    thread = LoopThread()
    try:
        coming = walk_blocking(steps(), thread)
        following = thread.submit(behind())
        assert not any(each.done() for each in (coming, following))
        thread.loop.call_soon_threadsafe(may_end.set)
        following.result(30)
        assert (coming.result(), order) == ("the result", ["ended", "behind"])
    finally:
        thread.stop()


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("walk_it", [blocking, on_loop])
def test_a_step_that_has_ended_has_its_result(walk_it: Walk, is_done: bool) -> None:
    """Coroutines wait for it in any case; so does a thread that has no time to look."""

    def steps() -> Steps[int]:
        first = yield Soon(doubled(1), 0.0, lambda: is_done)
        return (yield Soon(doubled(first), 30.0, lambda: False))

    assert walk_it(steps()) == 4


@pytest.mark.parametrize("walk_it", [blocking, on_loop])
def test_generator_may_do_nothing_at_all(walk_it: Walk) -> None:
    """A value without a single step."""

    def steps() -> Steps[int]:
        return 3
        yield  # makes it a generator

    assert walk_it(steps()) == 3


@pytest.mark.parametrize("walk_it", [blocking, on_loop])
def test_generator_cleans_up_with_steps_after_an_error(walk_it: Walk) -> None:
    """The error of a step arrives at its yield; steps taken while it is handled run, and then it goes on."""
    cleaned: list[int] = []

    def steps() -> Steps[None]:
        try:
            yield failing()
        finally:
            cleaned.append((yield doubled(4)))

    with pytest.raises(ValueError, match="a step failed"):
        walk_it(steps())
    assert cleaned == [8]


@pytest.mark.parametrize("walk_it", [blocking, on_loop])
def test_a_started_step_goes_on_beside_the_others(walk_it: Walk) -> None:
    """It has begun before the next step, which can wait for what comes of it; the generator does not."""
    order: list[str] = []
    may_end, has_ended = asyncio.Event(), asyncio.Event()

    async def beside() -> None:
        order.append("begun")
        await may_end.wait()
        order.append("ended")
        has_ended.set()

    async def end() -> None:
        order.append("asked to end")
        may_end.set()
        await has_ended.wait()

    def steps() -> Steps[str]:
        yield Started(beside())
        yield end()
        return "done"

    assert walk_it(steps()) == "done"
    assert order == ["begun", "asked to end", "ended"]


def test_what_waits_behind_the_first_keeps_its_order() -> None:
    """Also where the first ends, and more is handed in, before those that wait have gone on."""
    order: list[str] = []
    later: list[concurrent.futures.Future[None]] = []
    may_end, thread = asyncio.Event(), LoopThread()

    async def note(name: str) -> None:
        order.append(name)

    try:
        first = thread.submit_first(may_end.wait())
        waiting = thread.submit(note("waited"))
        first.add_done_callback(lambda _: later.append(thread.submit(note("came later"))))
        thread.loop.call_soon_threadsafe(may_end.set)
        waiting.result(30)
        later[0].result(30)
    finally:
        thread.stop()
    assert order == ["waited", "came later"]


def test_cancellation_is_cleaned_up_after() -> None:
    """A cancelled task runs the generator's clean-up before it ends."""
    cleaned: list[int] = []

    def steps() -> Steps[None]:
        try:
            yield forever()
        finally:
            cleaned.append((yield doubled(4)))

    async def cancelled() -> None:
        task = asyncio.create_task(walk(steps()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert cleaned == [8]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_an_interrupt_comes_to_the_generator_wherever_it_finds_the_walk() -> None:
    """Also between two steps: what goes on beside them would never be ended."""
    thread = LoopThread()
    try:
        for line in itertools.count(1):
            seen: list[str] = []
            interrupted = Interruption(line)
            try:
                with interrupted:
                    walk_blocking(noting(seen), thread)
            except KeyboardInterrupt:
                assert seen in ([], ["begun", "cleaned up"], ["begun", "done"]), f"at line {line}"
            if not interrupted.has_come:
                break
    finally:
        thread.stop()
    assert line > 10
    assert seen == ["begun", "done"]


def noting(seen: list[str]) -> Steps[None]:
    try:
        seen.append("begun")
        yield Started(doubled(1))
        yield doubled(2)
    except BaseException:
        yield doubled(3)
        seen.append("cleaned up")
        raise
    seen.append("done")


class Interruption:
    """Ctrl-C when the so manieth line of `steps` is come to."""

    def __init__(self, line: int) -> None:
        self._lines_left = line
        self.has_come = False

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != walk_blocking.__code__.co_filename:
            return None
        if event == "line":
            self._lines_left -= 1
            if self._lines_left == 0:
                self.has_come = True
                raise KeyboardInterrupt
        return self._trace
