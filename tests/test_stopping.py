"""The way from SIGTERM to the end, whatever is under way. No vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    BeginRefit,
    CommitRefit,
    PrepareRefit,
    RefitBegan,
    RefitCommitted,
    RefitHeld,
    RefitPrepared,
    RefitValidated,
    ValidateRefit,
)
from refit_protocol.states import EngineState
from refitd.app import ExitCode
from refitd.sessions import Session
from tests.scripted_app import ScriptedApp, running_app


def states_of(scripted: ScriptedApp) -> list[EngineState]:
    """Those that the engine goes through from now on."""
    states: list[EngineState] = []
    scripted.app.gate.on_change = states.append
    return states


async def beginning(scripted: ScriptedApp, kind: str) -> tuple[Session, asyncio.Task[Any]]:
    """A refit that stays open once it has begun; it has not, yet."""
    session, epoch = await scripted.writer()
    if kind == "prepare":
        source = await scripted.open(session, epoch)
        return session, asyncio.create_task(
            scripted.ask(session, PrepareRefit(epoch=epoch, source=source), RefitPrepared)
        )
    if kind == "hold":
        source = await scripted.open(session, epoch)
        return session, asyncio.create_task(
            scripted.ask(session, CommitRefit(epoch=epoch, source=source, hold=True), RefitHeld)
        )
    source = await scripted.open(session, epoch, "bucket")
    return session, asyncio.create_task(scripted.ask(session, BeginRefit(epoch=epoch, source=source), RefitBegan))


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("hold", "freeze"),
        ("hold", "refitd_commit"),
        ("bucket", "freeze"),
        ("bucket", "refitd_begin"),
        ("prepare", "freeze"),
        ("prepare", "refitd_prepare"),
    ],
)
def test_a_refit_that_is_just_beginning_does_not_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, call: str
) -> None:
    """However far it is: its trainer is told, and requests are drained as without it. What was written is torn."""

    async def run() -> None:
        async with running_app(tmp_path, monkeypatch) as (scripted, ended):
            states = states_of(scripted)
            held = scripted.llm.hold(call)
            scripted.app.gate.enter()
            _, begun = await beginning(scripted, kind)
            await held.begun.wait()
            scripted.stop()
            await asyncio.sleep(0)
            held.may_end.set()
            with pytest.raises(ProtocolError) as refused:
                await begun
            assert refused.value.code in (ErrorCode.REFIT_FAILED, ErrorCode.UNKNOWN_REFIT)
            scripted.app.gate.leave()
            assert await ended is ExitCode.OK
            before = EngineState.TORN if call == "refitd_commit" else EngineState.READY
            assert states == [EngineState.REFITTING, before, EngineState.DRAINING]

    asyncio.run(run())


def test_a_refit_that_is_prepared_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer is not waited for; the gate opens, so that requests that are running can end."""

    async def run() -> None:
        async with running_app(tmp_path, monkeypatch) as (scripted, ended):
            states = states_of(scripted)
            scripted.app.gate.enter()
            _, preparing = await beginning(scripted, "prepare")
            await preparing
            thawed = scripted.llm.hold("thaw")
            scripted.stop()
            await thawed.begun.wait()
            assert states == [EngineState.REFITTING, EngineState.READY]
            scripted.llm.release()
            scripted.app.gate.leave()
            assert await ended is ExitCode.OK
            assert states == [EngineState.REFITTING, EngineState.READY, EngineState.DRAINING]
            assert scripted.llm.calls.index("refitd_abort") < scripted.llm.calls.index("thaw")
            assert "refitd_commit" not in scripted.llm.calls

    asyncio.run(run())


def test_a_refit_that_comes_while_another_is_ending_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What writes is waited for, and nothing can slip in behind it."""

    async def run() -> None:
        async with running_app(tmp_path, monkeypatch, refit={"keep_last": "host"}) as (scripted, ended):
            states = states_of(scripted)
            session, epoch = await scripted.writer()
            commit = CommitRefit(epoch=epoch, source=await scripted.open(session, epoch))
            keeping = scripted.llm.hold("refitd_keep_last")
            first = asyncio.create_task(scripted.ask(session, commit, RefitCommitted))
            await keeping.begun.wait()
            assert scripted.app.gate.open
            scripted.stop()
            await asyncio.sleep(0)
            second = asyncio.create_task(scripted.ask(session, commit, RefitCommitted))
            await asyncio.sleep(0)
            scripted.llm.release()
            with pytest.raises(ProtocolError) as refused:
                await second
            assert refused.value.code is ErrorCode.DRAINING
            assert (await first).report.version == 1
            assert await ended is ExitCode.OK
            assert states[-1] is EngineState.DRAINING

    asyncio.run(run())


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
