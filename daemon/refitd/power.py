"""Sleep and wake: device memory for the trainer between generations. What is not in the table is refused, never
tried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import Sleep, SleepStateChanged, SleepTag, WakeUp
from refit_protocol.states import ASLEEP, SLEEP_TRANSITIONS, EngineState, SleepEvent, SleepState, step
from refitd.commit import Commit
from refitd.config import RefitConfig
from refitd.engine import Engine
from refitd.gate import Gate
from refitd.sessions import Answer, Call

SLEEP_EVENTS = {1: SleepEvent.SLEEP_1, 2: SleepEvent.SLEEP_2}
WAKE_EVENTS = {
    frozenset(("weights",)): SleepEvent.WAKE_WEIGHTS,
    frozenset(("kv_cache",)): SleepEvent.WAKE_KV_CACHE,
    frozenset(("weights", "kv_cache")): SleepEvent.WAKE_ALL,
}


class Power:
    """One change at a time; a request that comes meanwhile waits for it."""

    def __init__(self, config: RefitConfig, engine: Engine, gate: Gate, commit: Commit) -> None:
        self._config = config
        self._engine = engine
        self._gate = gate
        self._commit = commit
        self._order = asyncio.Lock()

    async def sleep(self, call: Call) -> AsyncIterator[Answer]:
        """Running requests finish or are aborted first; `keep` and `recompute` are refused: KV does not sleep."""
        assert isinstance(call.body, Sleep)
        if call.body.policy not in ("finish", "abort"):
            raise ProtocolError(
                ErrorCode.UNSUPPORTED, f"policy {call.body.policy!r}: requests cannot sleep, choose finish or abort"
            )
        async with self._order:
            await asyncio.shield(self._fall_asleep(call.body))
        yield self._answer()

    async def wake_up(self, call: Call) -> AsyncIterator[Answer]:
        """Waking what is awake changes nothing. After level 2 the weights are empty until a full refit."""
        assert isinstance(call.body, WakeUp)
        async with self._order:
            await asyncio.shield(self._wake(call.body.tags))
        yield self._answer()

    async def _fall_asleep(self, body: Sleep) -> None:
        await self._commit.stand_down()
        self._refuse_unless((EngineState.READY, EngineState.ASLEEP))
        with self._commit.exclusive("a change of sleep"):
            async with self._commit.cleaning.order:
                await self._change_to_sleep(body)

    async def _change_to_sleep(self, body: Sleep) -> None:
        event = SLEEP_EVENTS[body.level]
        before = self._gate.sleep
        if step(SLEEP_TRANSITIONS, before, event) is before:
            return
        # First the table, then the wait: from here on new requests are refused, so that `finish` comes to an end.
        self._gate.step_sleep(event)
        try:
            await self._quiet(body)
            await self._engine.before_sleep()
        except BaseException:
            self._gate.step_sleep(SleepEvent.SLEEP_GIVEN_UP)
            raise
        await self._engine.sleep(body.level)
        if body.level == 2:
            self._commit.weights_dropped()

    async def _quiet(self, body: Sleep) -> None:
        if body.policy == "abort":
            await self._commit.abort_requests(ErrorCode.ABORTED)
        deadline = time.monotonic() + self._config.deadline_seconds
        await self._gate.until_idle(deadline - time.monotonic())

    async def _wake(self, tags: Sequence[SleepTag] | None) -> None:
        await self._commit.stand_down()
        self._refuse_unless((EngineState.READY, EngineState.ASLEEP))
        with self._commit.exclusive("a change of sleep"):
            await self._change_to_awake(tags)

    async def _change_to_awake(self, tags: Sequence[SleepTag] | None) -> None:
        if tags is not None and not tags:
            raise ProtocolError(
                ErrorCode.MALFORMED_MESSAGE, "tags is empty: name what to wake, or leave it out for all"
            )
        event = SleepEvent.WAKE_ALL if tags is None else WAKE_EVENTS[frozenset(tags)]
        before = self._gate.sleep
        after = step(SLEEP_TRANSITIONS, before, event)
        if after is before:
            return
        await self._engine.wake_up(_still_asleep(before, tags))
        self._gate.step_sleep(event)

    def _refuse_unless(self, states: Sequence[EngineState]) -> None:
        if self._gate.state not in states:
            raise ProtocolError(
                ErrorCode.NOT_ALLOWED_NOW,
                f"not possible while {self._gate.state.value}",
                state=self._gate.state.value,
            )

    def _answer(self) -> Answer:
        level, tags = ASLEEP[self._gate.sleep]
        servable = self._gate.sleep is SleepState.AWAKE
        return Answer(
            SleepStateChanged(level=level, asleep_tags=msgspec.convert(tags, list[SleepTag]), servable=servable)
        )


def _still_asleep(state: SleepState, tags: Sequence[str] | None) -> list[str] | None:
    """vLLM must not be asked to wake what is awake; None wakes everything in one call."""
    asleep = ASLEEP[state][1]
    wanted = asleep if tags is None else tuple(tag for tag in asleep if tag in tags)
    return None if set(wanted) == {"weights", "kv_cache"} else list(wanted)
