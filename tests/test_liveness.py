"""An engine that does not answer: when it is taken for dead, and when for busy. No vLLM."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import RefitValidated, ValidateRefit
from refit_protocol.states import EngineState
from refitd.app import ExitCode
from refitd.liveness import is_work, work_seconds
from tests.scripted_app import ScriptedApp, running_app

WATCHED = {"liveness_interval_seconds": 0.01, "liveness_timeout_seconds": 0.05}
# Long enough for a process to be seen working beside many others.
PATIENT = {"liveness_interval_seconds": 0.01, "liveness_timeout_seconds": 2.0}


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


@contextmanager
def compiling() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that works for as long as it is let: what an engine that compiles has below it."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            yield child
        finally:
            child.kill()


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


def test_an_engine_that_is_only_asked_whether_it_stands_still_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is asked after the last request, and answered at once: an engine that hangs in this moment is found, too."""

    async def run() -> None:
        async with running_app(tmp_path, monkeypatch, engine=WATCHED) as (scripted, ended):
            asked = scripted.llm.hold("is_sleeping")
            settling = asyncio.create_task(scripted.app.engine.settle(600.0))
            await asked.begun.wait()
            assert await ended is ExitCode.ENGINE_DIED
            with pytest.raises(ProtocolError):
                await settling

    asyncio.run(run())


def test_an_engine_that_works_may_be_late_with_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervisor: socket.socket
) -> None:
    """As one that compiles what the first request of a kind needs; the supervisor is told meanwhile that it lives."""

    async def run() -> None:
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        async with running_app(tmp_path, monkeypatch, environment, engine=PATIENT) as (scripted, ended):
            pinged = scripted.llm.hold("is_sleeping")
            with compiling():
                await pinged.begun.wait()
                while scripted.app.metrics._engine_missed._value.get() < 2:
                    signs = asyncio.create_task(signs_of_life(supervisor, 1))
                    await asyncio.wait({signs, ended}, return_when=asyncio.FIRST_COMPLETED)
                    assert signs.done()
                scripted.llm.release()
                await signs_of_life(supervisor, 2)
            assert scripted.app.gate.state is EngineState.READY

    asyncio.run(run())


def test_an_engine_that_works_and_never_answers_is_dead_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that hangs may keep its processes busy for ever."""

    async def run() -> None:
        async with running_app(tmp_path, monkeypatch, engine={**PATIENT, "liveness_busy_seconds": 3.9}) as (
            scripted,
            ended,
        ):
            scripted.llm.hold("is_sleeping")
            with compiling():
                assert await ended is ExitCode.ENGINE_DIED
            assert scripted.app.metrics._engine_missed._value.get() == 2

    with capture_logs() as lines:
        asyncio.run(run())
    (reason,) = [line["reason"] for line in lines if line["event"] == "the engine died"]
    assert "although its processes work" in reason


def test_an_engine_with_a_stopped_process_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However busily the others wait for it."""

    async def run() -> None:
        async with running_app(tmp_path, monkeypatch, engine=PATIENT) as (scripted, ended):
            with compiling(), compiling() as stopped:
                stopped.send_signal(signal.SIGSTOP)
                scripted.llm.hold("is_sleeping")
                assert await ended is ExitCode.ENGINE_DIED
            assert scripted.app.metrics._engine_missed._value.get() == 1

    asyncio.run(run())


def test_the_work_of_children_that_are_gone_counts() -> None:
    """A compiler is called again and again, and each call lives for a moment."""
    code = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 1: pass'])\n"
        "print(flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as compiler:
        assert compiler.stdout is not None
        compiler.stdout.readline()
        worked = work_seconds()
        assert worked is not None
        assert worked[compiler.pid] >= 1.0
        compiler.communicate()


def test_work_is_that_of_one_process() -> None:
    """One that was there or has come; the timers of many idle ones are none, nor is anything while one is stopped."""
    assert is_work({1: 5.0, 2: 5.0}, {1: 5.0, 2: 5.6}, 10.0)
    assert is_work({1: 5.0}, {1: 5.0, 3: 0.6}, 10.0)
    assert not is_work(dict.fromkeys(range(20), 5.0), dict.fromkeys(range(20), 5.1), 10.0)
    assert not is_work({1: 5.0}, {1: 5.01}, 0.01)
    assert not is_work({1: 5.0}, None, 10.0)
    assert not is_work(None, {1: 9.0}, 10.0)
    assert not is_work({1: 5.0}, {}, 10.0)


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
