"""Waiting for another thread so that Ctrl-C always ends it.

Python notices a signal that comes just before its thread begins to wait for a lock only when something wakes that
thread, which may never happen: so it wakes by itself now and then.
"""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")

WAKE_SECONDS = 1.0


def result_of(future: Future[_Result]) -> _Result:
    """What it returns or raises."""
    while True:
        try:
            return future.result(WAKE_SECONDS)
        except TimeoutError:
            # Else it is the future's own.
            if future.done():
                return future.result()


def next_of(arrived: queue.SimpleQueue[_Result], timeout_seconds: float | None) -> _Result:
    """Raises TimeoutError."""
    until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        left = WAKE_SECONDS if until is None else min(WAKE_SECONDS, max(0.0, until - time.monotonic()))
        try:
            return arrived.get(timeout=left)
        except queue.Empty:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError from None
