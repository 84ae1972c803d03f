"""Waits for what has no event to wait for: the kernel's or another process' doing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.005


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Returns once `condition` holds; raises AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        pause.wait(LOOK_SECONDS)
