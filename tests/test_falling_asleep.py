"""What has to be over before the engine may sleep, and what is so when it cannot. No vLLM: see test_power for that."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import Sleep, SleepStateChanged, WakeUp
from refit_protocol.states import EngineState, SleepState
from tests.scripted_app import ScriptedApp, loaded_app, worker_refusal

STILL_READ = worker_refusal(ErrorCode.REFIT_FAILED)
NO_ROOM = worker_refusal(ErrorCode.ENGINE_ERROR)
LEVELS = pytest.mark.parametrize("level", [1, 2])


async def fall_asleep(scripted: ScriptedApp, level: Any) -> SleepStateChanged:
    return await scripted.ask(scripted.session(), Sleep(level=level, policy="finish"), SleepStateChanged)


@LEVELS
def test_sleep_comes_after_whatever_still_reads_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """Calls beside vLLM's, which vLLM knows nothing of, and what the workers do in the background."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            engine = scripted.app.engine
            digest = asyncio.get_running_loop().create_future()
            await engine.settle(60.0)
            monkeypatch.setattr(engine, "_lines", SimpleNamespace(call=lambda _message: digest, close=lambda: None))
            reading = asyncio.create_task(scripted.app.commit.read_digest("full"))
            await asyncio.sleep(0)
            sleeping = asyncio.create_task(fall_asleep(scripted, level))
            while not engine._calls:  # noqa: ASYNC110 - a call that waits for others has no event
                await asyncio.sleep(0)
            assert scripted.llm.calls[-1] == "is_sleeping"
            digest.set_result([{"ok": True, "digest": "0", "digest_parts": {}}])
            await asyncio.gather(reading, sleeping)
            assert scripted.llm.calls[-2:] == ["refitd_before_sleep", f"sleep {level}"]

    asyncio.run(run())


@LEVELS
def test_a_sleep_that_comes_too_early_leaves_the_engine_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """Requests that do not end, or weights that are still read: vLLM has not been asked, and serving goes on."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch, refit={"deadline_seconds": 0.05}) as scripted:
            gate = scripted.app.gate
            gate.enter()
            with pytest.raises(ProtocolError) as refused:
                await fall_asleep(scripted, level)
            assert refused.value.code is ErrorCode.DEADLINE_EXCEEDED
            assert (gate.state, gate.sleep) == (EngineState.READY, SleepState.AWAKE)
            gate.leave()
            scripted.llm.failures["refitd_before_sleep"] = STILL_READ
            with pytest.raises(ProtocolError) as refused:
                await fall_asleep(scripted, level)
            assert refused.value.code is ErrorCode.REFIT_FAILED
            assert await gate.admit() == 0
            assert f"sleep {level}" not in scripted.llm.calls
            del scripted.llm.failures["refitd_before_sleep"]
            assert (await fall_asleep(scripted, level)).level == level

    asyncio.run(run())


@LEVELS
def test_an_engine_that_fails_to_sleep_is_not_served_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """vLLM has stopped its scheduler by then, and nothing says what is left of its memory."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            scripted.llm.failures[f"sleep {level}"] = RuntimeError("out of host memory")
            with pytest.raises(ProtocolError) as refused:
                await fall_asleep(scripted, level)
            assert refused.value.code is ErrorCode.ENGINE_DEAD
            assert "out of host memory" in refused.value.message
            assert scripted.app.gate.state is EngineState.DEAD

    asyncio.run(run())


def test_waking_up_can_be_asked_again_only_where_vllm_was_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory is a refusal; what fails inside of vLLM ends the engine."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            gate, session = scripted.app.gate, scripted.session()
            await fall_asleep(scripted, 1)
            scripted.llm.failures["refitd_require_room"] = NO_ROOM
            with pytest.raises(ProtocolError) as refused:
                await scripted.ask(session, WakeUp(), SleepStateChanged)
            assert (refused.value.code, gate.state) == (ErrorCode.ENGINE_ERROR, EngineState.ASLEEP)
            del scripted.llm.failures["refitd_require_room"]
            scripted.llm.failures["wake_up"] = RuntimeError("mapped twice")
            with pytest.raises(ProtocolError) as refused:
                await scripted.ask(session, WakeUp(), SleepStateChanged)
            assert (refused.value.code, gate.state) == (ErrorCode.ENGINE_DEAD, EngineState.DEAD)

    asyncio.run(run())
