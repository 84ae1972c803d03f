"""What has to be over before the engine may sleep, and what is so when it cannot. No vLLM: see test_power for that."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refit_protocol.messages import Sleep, SleepStateChanged
from tests.scripted_app import ScriptedApp, loaded_app

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
