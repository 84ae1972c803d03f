"""Prepared refits whose trainer is interrupted or cancelled, or whose daemon goes: nothing stays held."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

import pytest
import torch

from refit_protocol.messages import (
    AbortRefit,
    FinishRefit,
    PrepareRefit,
    ReleaseWriter,
)
from refit_trainer import (
    AsyncDaemon,
    Daemon,
    DaemonUnreachable,
    one_refit,
    share_parameters,
    writer,
)
from refit_trainer import client as client_module
from refit_trainer import prepared as prepared_module
from tests.trainer.answering import Answering
from tests.trainer.background import in_background, stands_waiting
from tests.trainer.granted import REPORT
from tests.trainer.peer import Peer
from tests.waiting import LOOK_SECONDS, until

# Of the loop: more than a command takes until it waits.
TURNS = 50

TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]


@pytest.fixture
def daemon(peer: Peer) -> Answering:
    return Answering(peer)


@pytest.fixture
def model() -> torch.nn.Module:
    return share_parameters(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("command", [PrepareRefit, FinishRefit])
def test_an_interrupted_trainer_has_ended_it(
    client: Daemon, daemon: Answering, model: torch.nn.Module, command: type
) -> None:
    """By its number where it has one, else with the role that it hangs on."""
    daemon.silent.add(command)

    def interrupt() -> None:
        daemon.came.acquire()
        # Python notices a signal that comes just before its thread waits for a lock only when something else wakes it.
        until(lambda: stands_waiting(threading.main_thread()), "the caller to wait")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    interrupting, _ = in_background(interrupt)
    with pytest.raises(KeyboardInterrupt), client.prepare_refit(model) as prepared:
        prepared.refit()
    interrupting.join()
    assert daemon.since_prepared() == ([ReleaseWriter] if command is PrepareRefit else [FinishRefit, AbortRefit])
    daemon.silent.clear()
    assert client.refit(model) == REPORT


@pytest.mark.usefixtures("daemon")
def test_an_interrupted_refit_does_not_wait_for_a_daemon_that_is_gone(
    peer: Peer, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a connection that is soon back: such a daemon has ended it by itself."""
    monkeypatch.setattr(one_refit, "RECONNECT_SECONDS", LOOK_SECONDS)

    async def run() -> None:
        async with AsyncDaemon.connect(peer.endpoint) as client:
            await client.refit(model)
            peer.stop()
            await asyncio.to_thread(until, lambda: not client.connection._up.is_set(), "its end to be noticed")
            refitting = asyncio.create_task(client.refit(model))
            for _ in range(TURNS):
                await asyncio.sleep(0)
            refitting.cancel()
            async with asyncio.timeout(30):
                await asyncio.wait([refitting])
            assert refitting.cancelled()
            peer.start()

    asyncio.run(run())


@pytest.mark.filterwarnings("error:a prepared refit was left")
def test_where_warnings_are_errors_a_block_that_was_left_is_withdrawn_too(
    peer: Peer, client: Daemon, daemon: Answering, model: torch.nn.Module
) -> None:
    with pytest.raises(RuntimeWarning, match="without refit"), client.prepare_refit(model):
        pass
    assert daemon.since_prepared() == [AbortRefit]
    daemon.asked.clear()

    async def run() -> None:
        async with await AsyncDaemon.connect(peer.endpoint) as other, await other.prepare_refit(model):
            pass

    with pytest.raises(RuntimeWarning, match="without refit"):
        asyncio.run(run())
    assert daemon.since_prepared() == [AbortRefit]


def interrupting(line: int) -> TraceFunction:
    """Before the `line`-th line of the client that this thread comes to, as Ctrl-C may."""
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, _argument: object) -> TraceFunction | None:
        if frame.f_code.co_filename not in (prepared_module.__file__, client_module.__file__):
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    return trace


def is_interrupted(client: Daemon, model: torch.nn.Module, line: int, *, refits: bool) -> bool:
    before = sys.gettrace()
    try:
        with client.prepare_refit(model) as prepared:
            sys.settrace(interrupting(line))
            if refits:
                prepared.refit()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


# The block is left before its first line.
@pytest.mark.parametrize(("refits", "first"), [(True, 1), (False, 2)], ids=["refit", "leave"])
@pytest.mark.filterwarnings("ignore:a prepared refit was left", "ignore:coroutine .* was never awaited")
def test_an_interrupt_at_any_line_of_its_end_leaves_nothing_held(
    client: Daemon, daemon: Answering, model: torch.nn.Module, refits: bool, first: int
) -> None:
    """Else the engine would stand still for all of `hold_seconds`, and the next refit be refused."""
    for line in itertools.count(first):
        daemon.asked.clear()
        if not is_interrupted(client, model, line, refits=refits):
            break
        until(lambda: {AbortRefit, FinishRefit} & {*daemon.since_prepared()}, f"the end, interrupted at line {line}")
    assert line > first
    assert client.refit(model) == REPORT


@pytest.mark.parametrize("command", [PrepareRefit, FinishRefit])
def test_a_cancelled_trainer_has_ended_it(peer: Peer, daemon: Answering, model: torch.nn.Module, command: type) -> None:
    daemon.silent.add(command)

    async def run() -> None:
        async with await AsyncDaemon.connect(peer.endpoint) as client:

            async def refit() -> None:
                async with await client.prepare_refit(model) as prepared:
                    await prepared.refit()

            refitting = asyncio.create_task(refit())
            await asyncio.to_thread(daemon.came.acquire)
            refitting.cancel()
            await asyncio.wait({refitting})
            assert refitting.cancelled()
            ends = [ReleaseWriter] if command is PrepareRefit else [FinishRefit, AbortRefit]
            assert daemon.since_prepared() == ends
            assert await client.refit(model) == REPORT

    asyncio.run(run())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that broke is soon given up."""
    for module in (one_refit, writer):
        monkeypatch.setattr(module, "RECONNECT_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_block_is_left_without_waiting_for_a_daemon_that_is_gone(
    peer: Peer, client: Daemon, daemon: Answering, model: torch.nn.Module
) -> None:
    """It has ended the refit with itself; what the block raised is what its caller sees."""
    prepared = client.prepare_refit(model)
    peer.stop()
    with pytest.raises(ZeroDivisionError), prepared:
        raise ZeroDivisionError
    assert not daemon.since_prepared()
    peer.start()


@pytest.mark.usefixtures("impatient")
def test_a_refit_whose_daemon_goes_is_ended(
    peer: Peer, client: Daemon, daemon: Answering, model: torch.nn.Module
) -> None:
    """What became of it is not known, and no ordinary refit comes behind it."""
    daemon.silent.add(FinishRefit)
    refitting, outcome = in_background(client.prepare_refit(model).refit)
    daemon.came.acquire()
    peer.stop()
    refitting.join()
    assert isinstance(outcome[0], DaemonUnreachable)
    assert daemon.since_prepared() == [FinishRefit]
    peer.start()
