"""The way from SIGTERM to the end, whatever is under way. No vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import RefitValidated, ValidateRefit
from refit_protocol.states import EngineState
from refitd.app import ExitCode
from tests.scripted_app import running_app


def test_an_engine_that_dies_while_the_daemon_stops_ends_the_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for an answer is told at once, and running requests are waited for no longer."""

    async def run() -> None:
        patience = {"drain_seconds": 600.0, "policy": "finish"}
        async with running_app(tmp_path, monkeypatch, shutdown=patience) as (scripted, ended):
            session, epoch = await scripted.writer()
            command = ValidateRefit(epoch=epoch, source=await scripted.open(session, epoch))
            held = scripted.llm.hold("refitd_validate")
            validating = asyncio.create_task(scripted.ask(session, command, RefitValidated))
            await held.begun.wait()
            scripted.app.gate.enter()
            scripted.stop()
            await asyncio.sleep(0)
            scripted.app.engine.on_death(RuntimeError("its process is gone"))
            with pytest.raises(ProtocolError) as failed:
                await validating
            assert failed.value.code is ErrorCode.ENGINE_DEAD
            assert await ended is ExitCode.OK
            assert scripted.app.gate.state is EngineState.DEAD

    asyncio.run(run())
