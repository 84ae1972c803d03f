"""The gate: who may pass in which state, and that nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.states import EngineEvent, EngineState, SleepEvent
from refitd.gate import Gate

TO_READY = (EngineEvent.LOAD_STARTED, EngineEvent.LOADED)


def gate_after(*events: EngineEvent, wait_seconds: float = 5.0, max_waiting: int = 8) -> Gate:
    gate = Gate(wait_seconds, max_waiting)
    for event in events:
        gate.step(event)
    return gate


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ((), ErrorCode.LOADING),
        ((EngineEvent.LOAD_STARTED,), ErrorCode.LOADING),
        ((*TO_READY, EngineEvent.REFIT_STARTED, EngineEvent.REFIT_TORN), ErrorCode.TORN),
        ((*TO_READY, EngineEvent.FELL_ASLEEP), ErrorCode.ASLEEP),
        ((*TO_READY, EngineEvent.DRAIN_STARTED), ErrorCode.DRAINING),
        ((*TO_READY, EngineEvent.DIED), ErrorCode.ENGINE_DEAD),
    ],
)
def test_a_state_that_cannot_serve_refuses_at_once(events: tuple[EngineEvent, ...], code: ErrorCode) -> None:
    """Without waiting, with that state's own code."""
    with pytest.raises(ProtocolError) as refused:
        asyncio.run(gate_after(*events).admit())
    assert refused.value.code is code


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (EngineEvent.REFIT_COMMITTED, None),
        (EngineEvent.REFIT_REFUSED, None),
        (EngineEvent.REFIT_TORN, ErrorCode.TORN),
        (EngineEvent.DIED, ErrorCode.ENGINE_DEAD),
    ],
)
def test_a_request_that_waits_through_a_refit_is_always_answered(
    outcome: EngineEvent, expected: ErrorCode | None
) -> None:
    """Admitted when the gate opens, refused with the reason when it does not."""

    async def run() -> ErrorCode | None:
        gate = gate_after(*TO_READY, EngineEvent.REFIT_STARTED)
        waiting = asyncio.create_task(gate.admit())
        while gate.waiting == 0:  # noqa: ASYNC110 - the gate tells nobody that somebody waits
            await asyncio.sleep(0)
        gate.step(outcome)
        try:
            await waiting
        except ProtocolError as error:
            return error.code
        assert gate.waiting == 0
        return None

    assert asyncio.run(run()) is expected


def test_waiting_is_bounded_in_time_and_number() -> None:
    """A refit that does not end costs a request its own wait, not for ever; one too many is refused at once."""

    async def run() -> list[ErrorCode]:
        gate = gate_after(*TO_READY, EngineEvent.REFIT_STARTED, wait_seconds=0.05, max_waiting=1)
        outcomes = await asyncio.gather(gate.admit(), gate.admit(), return_exceptions=True)
        assert all(isinstance(outcome, ProtocolError) for outcome in outcomes)
        return [outcome.code for outcome in outcomes if isinstance(outcome, ProtocolError)]

    assert asyncio.run(run()) == [ErrorCode.DEADLINE_EXCEEDED, ErrorCode.TOO_MANY_REQUESTS]


def test_a_version_that_does_not_come_is_said() -> None:
    """The reply names the version that is served."""

    async def run() -> ProtocolError:
        with pytest.raises(ProtocolError) as refused:
            await gate_after(*TO_READY).admit(min_version=3, wait_seconds=0.01)
        return refused.value

    error = asyncio.run(run())
    assert error.code is ErrorCode.VERSION_UNAVAILABLE
    assert error.details["version"] == 0


def test_publishing_tells_those_who_move_requests_over() -> None:
    """Hooks run with the new version, before the gate opens."""

    async def run() -> list[tuple[int, EngineState]]:
        gate = gate_after(*TO_READY, EngineEvent.REFIT_STARTED)
        told: list[tuple[int, EngineState]] = []

        async def hook(version: int) -> None:
            told.append((version, gate.state))

        gate.on_publish.append(hook)
        await gate.publish(7)
        gate.refit_ended(EngineEvent.REFIT_COMMITTED)
        assert gate.version == 7
        assert gate.open
        return told

    assert asyncio.run(run()) == [(7, EngineState.REFITTING)]


def test_what_slept_before_a_refit_sleeps_after_it() -> None:
    """A refit of awake weights with a sleeping KV cache does not make the engine servable."""
    gate = gate_after(*TO_READY)
    gate.step_sleep(SleepEvent.SLEEP_1)
    gate.step_sleep(SleepEvent.WAKE_WEIGHTS)
    gate.step(EngineEvent.REFIT_STARTED)
    gate.refit_ended(EngineEvent.REFIT_COMMITTED)
    assert gate.state is EngineState.ASLEEP
    gate.step_sleep(SleepEvent.WAKE_KV_CACHE)
    assert gate.open


def test_until_idle_ends_with_the_last_request_or_the_deadline() -> None:
    """The error names how many still run."""

    async def run() -> None:
        gate = gate_after(*TO_READY)
        gate.enter()
        with pytest.raises(ProtocolError) as late:
            await gate.until_idle(0.01)
        assert late.value.details["running"] == 1
        idle = asyncio.create_task(gate.until_idle(5.0))
        gate.leave()
        await idle

    asyncio.run(run())
