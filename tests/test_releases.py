"""A commit that is sent before its trainer has looked at its memory: nothing is read before the trainer says so."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.bell import withdrawal
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AcquireWriter,
    CommitRefit,
    RefitCommitted,
    SourceOpened,
    WriterAcquired,
)
from refit_protocol.states import EngineState
from refit_trainer import AsyncDaemon, Daemon, NotShareable, share_parameters
from refit_trainer.early_commit import EarlyCommit
from refit_trainer.memory import MemfdMemory
from refit_trainer.sharing import SharedModule
from tests.canary import unharmed
from tests.conftest import load_seed
from tests.daemon_process import DaemonProcess
from tests.gpu.peers import peer
from tests.lending import HostBell, lent
from tests.test_in_flight import Running
from tests.waiting import until
from tests.wire import RawClient
from tests.worker.models import random_model

# --- by messages ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bell() -> HostBell:
    return HostBell()


@pytest.fixture
def opened(daemon: Daemon, writer: RawClient, model: PreTrainedModel, bell: HostBell) -> tuple[int, int]:
    """(epoch, in-place source with a bell) of weights B in the shared model; the daemon serves weights A."""
    daemon.refit(model)
    load_seed(model, 1)
    epoch = writer.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
    source = writer.ask(lent(model, epoch, bell.segment), SourceOpened)
    assert source.release
    return epoch, source.source


def until_refitting(daemon: Daemon) -> None:
    until(lambda: daemon.status().state is EngineState.REFITTING, "the gate to shut")


def test_what_is_there_when_it_is_released_is_served(
    daemon: Daemon, writer: RawClient, model: PreTrainedModel, opened: tuple[int, int], bell: HostBell
) -> None:
    """Not what was there when the commit was sent; the second time, too, where plain copies do it all."""
    epoch, source = opened
    for release, seed in ((2, 0), (4, 1), (6, 2)):
        writer.post(CommitRefit(epoch=epoch, source=source, release=release))
        until_refitting(daemon)
        load_seed(model, seed)
        bell.release.write(release)
        assert isinstance(writer.receive().body, RefitCommitted)
        assert daemon.verify(model, full=True)


def test_what_is_withdrawn_changes_nothing(
    daemon: Daemon, writer: RawClient, model: PreTrainedModel, opened: tuple[int, int], bell: HostBell
) -> None:
    """And the next commit from the same source is one like any other."""
    epoch, source = opened
    with unharmed(daemon):
        writer.post(CommitRefit(epoch=epoch, source=source, release=2))
        until_refitting(daemon)
        bell.release.write(withdrawal(2))
        refused = writer.receive().body
        assert (refused.code, "withdrawn" in refused.message) == (ErrorCode.REFIT_FAILED, True)  # type: ignore[union-attr]
    bell.release.write(4)
    writer.ask(CommitRefit(epoch=epoch, source=source, release=4), RefitCommitted)
    assert daemon.verify(model, full=True)


def test_what_is_done_is_told_by_the_bell_and_nothing_else_is(
    daemon: Daemon, writer: RawClient, model: PreTrainedModel, opened: tuple[int, int], bell: HostBell
) -> None:
    """Neither a commit that was withdrawn, nor one that failed; before the answer, and by the proof of the plan as by
    its copies."""
    epoch, source = opened
    for release in (2, 4):
        bell.release.write(release)
        writer.ask(CommitRefit(epoch=epoch, source=source, release=release), RefitCommitted)
        assert bell.done() == release
    bell.release.write(withdrawal(6))
    writer.refused(CommitRefit(epoch=epoch, source=source, release=6))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    bell.release.write(8)
    refused = writer.refused(CommitRefit(epoch=epoch, source=source, release=8, check_finite=True))
    assert (refused.code, bell.done()) == (ErrorCode.NOT_FINITE, 4)


@pytest.mark.parametrize("release", [-2, 1, 1 << 32])
def test_numbers_that_are_none_are_refused(
    daemon: Daemon, writer: RawClient, opened: tuple[int, int], release: int
) -> None:
    epoch, source = opened
    with unharmed(daemon):
        refused = writer.refused(CommitRefit(epoch=epoch, source=source, release=release))
    assert refused.code is ErrorCode.INVALID_DESCRIPTOR


def test_without_a_bell_nothing_waits(daemon: Daemon, writer: RawClient, model: PreTrainedModel) -> None:
    """A trainer that relies on it must not be read before it has looked."""
    epoch = writer.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
    source = writer.ask(lent(model, epoch), SourceOpened)
    assert not source.release
    with unharmed(daemon):
        refused = writer.refused(CommitRefit(epoch=epoch, source=source.source, release=2))
    assert refused.code is ErrorCode.UNSUPPORTED


# --- by the client ----------------------------------------------------------------------------------------------------


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[EarlyCommit]:
    """Memory on a CPU has bells, too; these are the commits that were sent before it was looked at."""
    sent: list[EarlyCommit] = []
    release = EarlyCommit.release

    def noted(commit: EarlyCommit) -> None:
        sent.append(commit)
        release(commit)

    monkeypatch.setattr(MemfdMemory, "bell", lambda _memory: HostBell())
    monkeypatch.setattr(EarlyCommit, "release", noted)
    return sent


def test_refits_are_exact(daemon: Daemon, model: PreTrainedModel, early: list[EarlyCommit]) -> None:
    """All but the first, which opens the source, are sent before the module is looked at."""
    for seed in (0, 1, 0):
        load_seed(model, seed)
        daemon.refit(model)
        assert daemon.verify(model, full=True)
    assert len(early) == 2


def test_refits_of_coroutines_are_exact(
    daemon_process: DaemonProcess, model: PreTrainedModel, early: list[EarlyCommit]
) -> None:
    async def scenario() -> None:
        async with AsyncDaemon.connect(daemon_process.endpoint) as daemon:
            await daemon.acquire_writer(takeover=True)
            for seed in (0, 1):
                load_seed(model, seed)
                await daemon.refit(model)
                assert await daemon.verify(model, full=True)

    asyncio.run(scenario())
    assert len(early) == 1


@pytest.mark.usefixtures("early")
def test_parameters_that_have_moved_are_not_read(daemon: Daemon, model: PreTrainedModel) -> None:
    """Though the commit is under way: it is withdrawn, nothing has changed, and the role is kept."""
    for _ in range(2):
        daemon.refit(model)
    epoch = daemon.status().writer
    with unharmed(daemon):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
        with pytest.raises(NotShareable, match=r"lm_head\.weight was replaced or moved"):
            daemon.refit(model)
    assert daemon.status().writer == epoch
    share_parameters(model)
    daemon.refit(model)
    assert daemon.verify(model, full=True)


def test_running_requests_are_dealt_with_as_ever(
    daemon: Daemon, model: PreTrainedModel, early: list[EarlyCommit]
) -> None:
    """Every token is of the weights of its version, before and behind the commit."""
    running = Running(daemon, model)
    running.refit(1, "keep")
    assert len(early) == 1
    assert len(running.rest()) == 2


def trainer_that_never_looks(connection: Connection, endpoint: str) -> None:
    MemfdMemory.bell = lambda _memory: HostBell()  # type: ignore[method-assign, assignment, return-value]
    model = share_parameters(random_model("qwen3", seed=1))
    with Daemon.connect(endpoint) as daemon:
        daemon.acquire_writer(takeover=True)
        daemon.refit(model)
        connection.send("refitted")
        connection.recv()

        def look(_shared: SharedModule) -> None:
            connection.send("looking")
            connection.recv()

        SharedModule.require_in_place = look  # type: ignore[method-assign]
        daemon.refit(model)


def test_a_trainer_that_is_killed_meanwhile_holds_nobody_up(
    daemon: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel
) -> None:
    """Nothing was read; long before a release is waited for no longer the weights of before are served again."""
    with peer(trainer_that_never_looks, daemon_process.endpoint) as trainer:
        assert trainer.answer() == "refitted"
        with unharmed(daemon):
            assert trainer.ask("refit again") == "looking"
            until_refitting(daemon)
            trainer.kill()
            until(lambda: daemon.status().state is EngineState.READY, "the gate to open", seconds=5)
    daemon.acquire_writer(takeover=True)
    daemon.refit(model)
    assert daemon.verify(model, full=True)
