"""What a test's other thread does."""

from __future__ import annotations

import sys
import threading

from tests.waiting import LOOK_SECONDS


def in_background(work: object, *arguments: object) -> tuple[threading.Thread, list[object]]:
    """Runs `work` on a thread; what it returns or raises lands in the list."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work(*arguments))
        except Exception as error:  # noqa: BLE001
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def stands_waiting(thread: threading.Thread) -> bool:
    """In the same place at two looks, between which it could have run: not only for the interpreter."""
    assert thread.ident is not None
    places = []
    for _ in range(2):
        frame = sys._current_frames()[thread.ident]
        places.append((frame.f_code.co_name, frame.f_lasti))
        threading.Event().wait(LOOK_SECONDS)
    return places[0] == places[1] and places[0][0] == "wait"
