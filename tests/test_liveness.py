"""An engine that does not answer: when it is taken for dead, and when for busy. No vLLM."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import RefitValidated, ValidateRefit
from refit_protocol.states import EngineState
from refitd.app import ExitCode
from tests.scripted_app import ScriptedApp, running_app

WATCHED = {"liveness_interval_seconds": 0.01, "liveness_timeout_seconds": 0.05}


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[socket.socket]:
    """Where systemd would read what the daemon says of itself."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(tmp_path / "notify"))
        datagrams.setblocking(False)
        yield datagrams


async def signs_of_life(supervisor: socket.socket, count: int) -> None:
    while count:
        message = await asyncio.get_running_loop().sock_recv(supervisor, 4096)
        count -= message == b"WATCHDOG=1"


async def validate(scripted: ScriptedApp) -> asyncio.Task[RefitValidated]:
    """A dry run that the workers do not answer yet."""
    session, epoch = await scripted.writer()
    command = ValidateRefit(epoch=epoch, source=await scripted.open(session, epoch))
    held = scripted.llm.hold("refitd_validate")
    validating = asyncio.create_task(scripted.ask(session, command, RefitValidated))
    await held.begun.wait()
    return validating


def test_an_engine_is_trusted_while_a_call_with_a_deadline_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervisor: socket.socket
) -> None:
    """It does one thing at a time: a dry run that waits for the trainer's stream, a sleep, a digest of everything."""

    async def run() -> None:
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        async with running_app(tmp_path, monkeypatch, environment, engine=WATCHED) as (scripted, ended):
            validating = await validate(scripted)
            scripted.llm.hold("is_sleeping")
            signs = asyncio.create_task(signs_of_life(supervisor, 20))
            await asyncio.wait({signs, ended}, return_when=asyncio.FIRST_COMPLETED)
            assert signs.done()
            assert scripted.app.gate.state is EngineState.READY
            scripted.llm.release()
            await validating

    asyncio.run(run())


def test_an_engine_that_is_asked_nothing_is_dead_when_it_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped."""

    async def run() -> None:
        async with running_app(tmp_path, monkeypatch, engine=WATCHED) as (scripted, ended):
            scripted.llm.hold("is_sleeping")
            assert await ended is ExitCode.ENGINE_DIED

    asyncio.run(run())


def test_an_engine_that_answers_with_a_failure_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is asked cannot fail in one that works, whatever vLLM raises for it."""

    async def run() -> None:
        async with running_app(tmp_path, monkeypatch, engine=WATCHED) as (scripted, ended):
            scripted.llm.failures["is_sleeping"] = RuntimeError("no such call")
            assert await ended is ExitCode.ENGINE_DIED

    asyncio.run(run())


def test_a_call_that_is_out_ends_the_engine_at_its_own_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trust ends there, and whoever waits is told."""

    async def run() -> None:
        limits = {"deadline_seconds": 0.2}
        async with running_app(tmp_path, monkeypatch, engine=WATCHED, refit=limits) as (scripted, ended):
            validating = await validate(scripted)
            scripted.llm.hold("is_sleeping")
            with pytest.raises(ProtocolError) as failed:
                await validating
            assert failed.value.code is ErrorCode.ENGINE_DEAD
            assert await ended is ExitCode.ENGINE_DIED

    asyncio.run(run())
