"""Waits for what has no event to wait for: the kernel's or another process' doing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOK_SECONDS = 0.005


def until(condition: Callable[[], T | None], what: str, seconds: float = 30.0, look_seconds: float = LOOK_SECONDS) -> T:
    """The first truthy result of `condition`; raises AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        pause.wait(look_seconds)
    return result
