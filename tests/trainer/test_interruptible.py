"""Ctrl-C while another thread is waited for. The interrupts here wake nobody, as one that comes too early does not."""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from refit_trainer import interruptible
from refit_trainer.interruptible import next_of, result_of

Wait = Callable[[], object]

WAITS: list[Wait] = [
    lambda: result_of(Future()),
    lambda: next_of(queue.SimpleQueue(), None),
    lambda: next_of(queue.SimpleQueue(), 100.0),
]


@contextmanager
def interrupted_in(seconds: float) -> Iterator[None]:
    """By when the caller waits."""
    timer = threading.Timer(seconds, _thread.interrupt_main)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("wait", WAITS)
def test_an_interrupt_that_wakes_nobody_is_noticed(wait: Wait) -> None:
    with pytest.raises(KeyboardInterrupt), interrupted_in(0.2):
        wait()


def test_what_comes_meanwhile_is_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often nothing had come until then."""
    monkeypatch.setattr(interruptible, "WAKE_SECONDS", 1e-4)
    future: Future[int] = Future()
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seconds, tell in ((0.05, lambda: future.set_result(1)), (0.1, lambda: arrived.put(2))):
        threading.Timer(seconds, tell).start()
    assert (result_of(future), next_of(arrived, None)) == (1, 2)


def test_an_error_of_its_own_is_raised() -> None:
    """Also that it took too long."""
    future: Future[int] = Future()
    future.set_exception(TimeoutError("of its own"))
    with pytest.raises(TimeoutError, match="of its own"):
        result_of(future)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_a_bound_is_kept(seconds: float) -> None:
    """What is there by then is had, with no time at all too."""
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
    with pytest.raises(TimeoutError):
        next_of(arrived, seconds)
    arrived.put(3)
    assert next_of(arrived, seconds) == 3
