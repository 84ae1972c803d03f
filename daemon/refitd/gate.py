"""The gate between requests and the engine: its state, the version it serves, and who may pass.

Generation and refit meet only here. No vLLM, no sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import LastError
from refit_protocol.states import (
    ENGINE_TRANSITIONS,
    NOT_SERVABLE,
    SLEEP_TRANSITIONS,
    EngineEvent,
    EngineState,
    SleepEvent,
    SleepState,
    step,
)

# What is wrong and what helps, for whoever asks too early: by the protocol's name and the Python client's.
_ALL_ASLEEP = "the engine is asleep: wake it first (WakeUp, wake_up())"
_EMPTY = "the weights were dropped by a sleep at level 2, and none have come since"
SLEEP_ADVICE = {
    SleepState.LEVEL_1: _ALL_ASLEEP,
    SleepState.LEVEL_1_WEIGHTS_AWAKE: 'the KV cache still sleeps: wake it (WakeUp, wake_up(["kv_cache"]))',
    SleepState.LEVEL_1_KV_CACHE_AWAKE: 'the weights still sleep: wake them (WakeUp, wake_up(["weights"]))',
    SleepState.LEVEL_2: f"{_ALL_ASLEEP}, then commit a full refit: level 2 dropped the weights",
    SleepState.LEVEL_2_KV_CACHE_AWAKE: (
        'the weights still sleep: wake them (WakeUp, wake_up(["weights"])), then commit a full refit'
    ),
    SleepState.LEVEL_2_WEIGHTS_EMPTY: f"{_EMPTY}: commit a full refit, then wake the KV cache (WakeUp, wake_up())",
    SleepState.EMPTY: f"{_EMPTY}: commit a full refit",
}


class Gate:
    """Lives as long as the daemon. All methods belong to the event loop's thread."""

    def __init__(self, wait_seconds: float, max_waiting: int) -> None:
        self.state = EngineState.UNLOADED
        self.sleep = SleepState.AWAKE
        self.version = 0
        self.last_error: LastError | None = None
        self.running = 0
        self.waiting = 0
        # Of those: whoever waits for weights that are not served yet, and so for a refit.
        self.awaiting_version = 0
        self._wait_seconds = wait_seconds
        self._max_waiting = max_waiting
        self._changed = asyncio.Event()
        self.on_publish: list[Callable[[int], Awaitable[None]]] = []
        self.on_change: Callable[[EngineState], None] = lambda _state: None
        self.on_idle: Callable[[], None] = lambda: None
        # Before anybody passes, as long as a refit stands by.
        self.give_way: Callable[[], Awaitable[None]] | None = None

    @property
    def open(self) -> bool:
        return self.state is EngineState.READY

    def is_open_to(self, min_version: int | None = None) -> bool:
        """Whether `admit` would come back at once."""
        return self.open and self.give_way is None and (min_version is None or self.version >= min_version)

    def step(self, event: EngineEvent) -> None:
        """Raises `not_allowed_now` where the table does not allow `event`."""
        self.state = step(ENGINE_TRANSITIONS, self.state, event)
        self.on_change(self.state)
        self._wake()

    async def publish(self, version: int) -> None:
        """Makes `version` the one served. The engine must be frozen: `on_publish` may move requests over to it."""
        assert self.state is not EngineState.READY
        self.version = version
        for hook in self.on_publish:
            await hook(version)

    def step_sleep(self, event: SleepEvent) -> None:
        """Follows the sleep table, and keeps the engine's state in step with it: whatever sleeps is not served.

        Raises `not_allowed_now` where the table does not allow `event`.
        """
        self.sleep = step(SLEEP_TRANSITIONS, self.sleep, event)
        if self.sleep is not SleepState.AWAKE and self.state is EngineState.READY:
            self.step(EngineEvent.FELL_ASLEEP)
        elif self.sleep is SleepState.AWAKE and self.state is EngineState.ASLEEP:
            self.step(EngineEvent.WOKE)

    def refit_ended(self, outcome: EngineEvent) -> None:
        """Leaves `refitting`; what slept before the refit sleeps on."""
        self.step(outcome)
        if self.sleep is not SleepState.AWAKE and self.state is EngineState.READY:
            self.step(EngineEvent.FELL_ASLEEP)

    def failed(self, error: ProtocolError) -> None:
        """Remembers the last error for `Status`."""
        self.last_error = LastError(code=error.code, message=error.message, unix_seconds=time.time())

    def refusal(self) -> ProtocolError | None:
        """Why this state cannot serve a request that needs weights; None where it can, now or after a wait."""
        reason = NOT_SERVABLE.get(self.state)
        if reason is None:
            return None
        code, advice = reason
        if self.state is EngineState.ASLEEP:
            advice = SLEEP_ADVICE.get(self.sleep, advice)
        return ProtocolError(code, advice, state=self.state.value)

    async def admit(self, min_version: int | None = None, wait_seconds: float | None = None) -> int:
        """Waits, bounded, while a refit is under way or stands by, or `min_version` is not served yet; returns the
        version served.

        The caller must hand its request to the engine before it awaits anything else.
        Raises the state's typed error, `too_many_requests`, `version_unavailable` or `deadline_exceeded`.
        """
        if self._passes(min_version):
            return self.version
        # Somebody has to ask what stands by to give way.
        if self.waiting >= max(self._max_waiting, self.give_way is not None):
            raise ProtocolError(ErrorCode.TOO_MANY_REQUESTS, f"{self.waiting} requests wait at the gate already")
        limit = self._wait_seconds if wait_seconds is None else min(wait_seconds, self._wait_seconds)
        self.waiting += 1
        try:
            async with asyncio.timeout(limit):
                while not self._passes(min_version):
                    await self._come_nearer(min_version)
        except TimeoutError:
            raise self._waited_too_long(min_version, limit) from None
        finally:
            self.waiting -= 1
        return self.version

    def enter(self) -> None:
        self.running += 1

    def leave(self) -> None:
        assert self.running > 0
        self.running -= 1
        if self.running == 0:
            self._wake()
            self.on_idle()

    async def until_idle(self, deadline_seconds: float) -> None:
        """Waits until no request runs; raises `deadline_exceeded`."""
        try:
            async with asyncio.timeout(deadline_seconds):
                while self.running:
                    await self._change()
        except TimeoutError:
            raise ProtocolError(
                ErrorCode.DEADLINE_EXCEEDED,
                f"{self.running} requests still run after {deadline_seconds:g} s: cancel them or choose another policy",
                running=self.running,
            ) from None

    def _passes(self, min_version: int | None) -> bool:
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        return self.is_open_to(min_version)

    async def _come_nearer(self, min_version: int | None) -> None:
        """What stands by gives way to those who could pass then."""
        if min_version is not None and self.version < min_version:
            self.awaiting_version += 1
            try:
                await self._change()
            finally:
                self.awaiting_version -= 1
        else:
            await (self._change() if self.give_way is None else self.give_way())

    def _waited_too_long(self, min_version: int | None, limit: float) -> ProtocolError:
        if min_version is not None and self.version < min_version:
            return ProtocolError(
                ErrorCode.VERSION_UNAVAILABLE,
                f"version {min_version} was not served within {limit:g} s, the engine holds {self.version}",
                version=self.version,
            )
        return ProtocolError(ErrorCode.DEADLINE_EXCEEDED, f"the gate stayed shut for {limit:g} s during a refit")

    async def _change(self) -> None:
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()
