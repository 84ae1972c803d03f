"""Batches side by side, a refit alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from refit_trainer import AsyncFleet
from refit_trainer.fleet.turns import Turns
from tests.server.small_daemon import SmallDaemon


class Interrupted(BaseException):
    """A KeyboardInterrupt would end the tests."""


async def settled() -> None:
    """Every task that can go on has gone on."""
    for _ in range(10):
        await asyncio.sleep(0)


class Actor:
    """Enters and stays until told to leave."""

    def __init__(self, turns: Turns, kind: str) -> None:
        self.inside = False
        self._leave = asyncio.Event()
        enter: Callable[[], object] = turns.batch if kind == "batch" else lambda: turns.refit(60)
        self.task = asyncio.create_task(self._act(enter))

    async def leave(self) -> None:
        self._leave.set()
        await self.task
        await settled()

    async def _act(self, enter: Callable[[], object]) -> None:
        async with enter():  # type: ignore[attr-defined]
            self.inside = True
            await self._leave.wait()
        self.inside = False


def test_a_refit_waits_for_batches_and_holds_new_ones_back() -> None:
    """And refits come one after the other."""

    async def scene() -> None:
        turns = Turns()
        first, second = Actor(turns, "batch"), Actor(turns, "batch")
        await settled()
        assert first.inside
        assert second.inside
        refit = Actor(turns, "refit")
        late = Actor(turns, "batch")
        await settled()
        assert not refit.inside
        assert not late.inside
        await first.leave()
        assert not refit.inside
        await second.leave()
        assert refit.inside
        assert not late.inside
        another = Actor(turns, "refit")
        await settled()
        assert not another.inside
        await refit.leave()
        assert another.inside != late.inside
        await (another if another.inside else late).leave()
        await (late if late.inside else another).leave()

    asyncio.run(scene())


def test_a_refit_that_gives_up_lets_the_batches_go_on() -> None:
    async def scene() -> None:
        turns = Turns()
        batch = Actor(turns, "batch")
        await settled()
        with pytest.raises(TimeoutError):
            async with turns.refit(0.0):
                pass
        late = Actor(turns, "batch")
        await settled()
        assert late.inside
        await batch.leave()
        await late.leave()
        assert turns.batches == 0

    asyncio.run(scene())


def test_a_cancelled_batch_has_left() -> None:
    async def scene() -> None:
        turns = Turns()
        batch = Actor(turns, "batch")
        await settled()
        batch.task.cancel()
        await asyncio.gather(batch.task, return_exceptions=True)
        async with turns.refit(60):
            assert turns.batches == 0

    asyncio.run(scene())


def test_an_interrupt_just_after_the_turn_came_gives_it_back(small_daemons: list[SmallDaemon]) -> None:
    """As Ctrl-C on another thread does, between the turn and the refit: batches go on."""

    async def scene() -> None:
        async with AsyncFleet.connect([small_daemons[0].endpoint]) as fleet:
            steps = fleet.refit_steps({}, None, {})
            await next(steps)
            await steps.throw(Interrupted())
            with pytest.raises(Interrupted):
                next(steps)
            async with asyncio.timeout(30), fleet._turns.batch():
                pass

    asyncio.run(scene())
