"""How both sides wait for an answer that is due within milliseconds: awake.

A sleeping thread has to be woken, which on a virtual machine can take longer than all the work between two messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _nothing() -> None:
    return None


@contextmanager
def awake(seconds: float, meanwhile: Callable[[], None] = _nothing) -> Iterator[None]:
    """Inside, the running event loop looks for events without ever sleeping, for at most `seconds`; 0 changes nothing.

    It takes one core for so long, and everything else on the loop goes on. `meanwhile` is called in each of its turns.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    turn: asyncio.Handle | None = None

    def again() -> None:
        nonlocal turn
        meanwhile()
        turn = loop.call_soon(again) if loop.time() < until else None

    if seconds > 0:
        turn = loop.call_soon(again)
    try:
        yield
    finally:
        if turn is not None:
            turn.cancel()
