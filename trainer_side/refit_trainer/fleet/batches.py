"""The batches under way on a fleet, each a task of the event loop; to iterators what a connection is for one daemon."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

from refit_protocol.errors import ErrorCode
from refit_trainer.errors import ClientClosed, RefitdError
from refit_trainer.fleet.batch import Batch
from refit_trainer.fleet.members import Members
from refit_trainer.fleet.order import Order
from refit_trainer.fleet.routing import Router
from refit_trainer.fleet.turns import Turns
from refit_trainer.inbox import Mailbox


class Batches:
    def __init__(self, members: Members, turns: Turns, probe_seconds: float) -> None:
        self._members = members
        self._turns = turns
        self._probe_seconds = probe_seconds
        self._router = Router()
        self._numbers = itertools.count(1)
        self._running: dict[int, tuple[Batch, asyncio.Task[None]]] = {}
        self._closed = False

    async def start(self, order: Order, mailbox: Mailbox) -> int:
        """The number of the batch whose arrivals go to `mailbox`, the last of them its end or its error.

        Raises `ClientClosed` after `close()`.
        """
        if self._closed:
            raise ClientClosed("the fleet has been closed")
        number = next(self._numbers)
        batch = Batch(order, self._members, self._router, mailbox, self._probe_seconds)
        task = asyncio.create_task(self._run(batch, order, mailbox), name=f"fleet batch {number}")
        self._running[number] = batch, task
        task.add_done_callback(partial(self._ended, number, mailbox))
        return number

    async def cancel(self, request: int | None, *, timeout_seconds: float) -> list[int]:
        """Ends the outputs that are not finished with `cancelled`; None: of every batch."""
        chosen = [number for number in self._running if request in (None, number)]
        await asyncio.gather(*(self._running[number][0].cancel(timeout_seconds) for number in chosen))
        return chosen

    def abandon(self, request: int) -> None:
        """Nobody reads it any more."""
        if running := self._running.get(request):
            running[1].cancel()

    async def close(self) -> None:
        self._closed = True
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, number: int, mailbox: Mailbox, task: asyncio.Task[None]) -> None:
        """Here and not in the task, which may have been cancelled before it had begun."""
        del self._running[number]
        if task.cancelled():
            mailbox.put(ClientClosed("the batch was abandoned, or the fleet closed"))

    async def _run(self, batch: Batch, order: Order, mailbox: Mailbox) -> None:
        try:
            if order.mixed:
                await batch.run()
            else:
                async with self._turns.batch():
                    await batch.run()
        except RefitdError as error:
            mailbox.put(error)
        # The boundary of the task: a bug must reach whoever waits, not only the log.
        except Exception as error:  # noqa: BLE001
            failure = RefitdError(f"a bug in refit_trainer: {type(error).__name__}: {error}", code=ErrorCode.INTERNAL)
            failure.__cause__ = error
            mailbox.put(failure)
