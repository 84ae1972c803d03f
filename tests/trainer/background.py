"""What a test's other thread does."""

from __future__ import annotations

import threading


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
