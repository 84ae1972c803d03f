"""Work that goes on to its end when whoever asked for it is gone: nothing leaves the engine between two versions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from refitd.commit import Ticket
from refitd.sessions import Session

_Result = TypeVar("_Result")


class Running:
    """All refit work under way; `windows` is what waits for a refit's window, or is inside of it: for whom, and with
    the ticket that it can be given up by, if it can.

    Belongs to the event loop's thread.
    """

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.windows: dict[asyncio.Task[Any], tuple[Session, Ticket | None]] = {}

    def run(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def to_its_end(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """What `work` returns or raises; it is not cancelled with whoever waits for it."""
        return await asyncio.shield(self.run(work))

    async def in_window(self, session: Session, ticket: Ticket | None, work: Coroutine[Any, Any, _Result]) -> _Result:
        """As above; what only waits for the window ends when the session lets go of the writer's role."""
        task = self.run(work)
        self.windows[task] = (session, ticket)
        task.add_done_callback(self.windows.pop)
        return await asyncio.shield(task)

    async def leave_windows(self, session: Session, why: str) -> None:
        """What waits is given up, what writes is waited for: the next writer finds nothing under way."""
        own = {task: ticket for task, (owner, ticket) in self.windows.items() if owner is session}
        _withdraw(own.values(), why)
        if own:
            await asyncio.wait(own)

    def withdraw_all(self, why: str) -> None:
        """What waits is given up, whoever it is for."""
        _withdraw([ticket for _, ticket in self.windows.values()], why)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        # Whoever asked may be gone; the failure itself is in the log and in the status already.
        if not task.cancelled():
            task.exception()


def _withdraw(tickets: Iterable[Ticket | None], why: str) -> None:
    for ticket in tickets:
        if ticket is not None:
            ticket.withdraw(why)
