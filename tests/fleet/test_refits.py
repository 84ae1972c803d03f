"""Who is told what when some of three daemons fail, phase by phase; the daemons are peers that answer by a script."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AbortRefit,
    AcquireWriter,
    CommitRefit,
    FinishRefit,
    GetManifest,
    GetStatus,
    Manifest,
    OpenSource,
    RefitAborted,
    RefitCommitted,
    RefitHeld,
    RefitValidated,
    ReleaseWriter,
    Reply,
    Request,
    SourceOpened,
    Status,
    ValidateRefit,
    WriterAcquired,
    WriterReleased,
)
from refit_protocol.states import EngineState
from refit_trainer import (
    AsyncDaemon,
    Fleet,
    FleetRefitFailed,
    FleetRefitRefused,
    NoMember,
    RequestTimedOut,
    share_parameters,
)
from refit_trainer.fleet.policy import OnFailure
from refit_trainer.sharing import shared_module
from tests.fleet.conftest import directory_in
from tests.trainer.granted import REPORT
from tests.trainer.peer import STATUS as PEER_STATUS
from tests.trainer.peer import Asked, Peer, endpoint_in, running

SERVED = 3
STATUS = msgspec.structs.replace(
    PEER_STATUS, version=SERVED, digest="0", digest_mode="sampled", restorable_version=SERVED
)
ANSWERS: dict[type[Request], Reply] = {
    GetStatus: STATUS,
    GetManifest: Manifest(tensors=[]),
    AcquireWriter: WriterAcquired(epoch=2),
    OpenSource: SourceOpened(source=1, path="plan", tensors=2, size_bytes=1, unplanned=[]),
    ValidateRefit: RefitValidated(version=4, path="plan", restorable_version=SERVED, milliseconds=1.0),
    FinishRefit: RefitCommitted(report=REPORT),
    AbortRefit: RefitAborted(refit=5, state=EngineState.READY, version=SERVED),
    ReleaseWriter: WriterReleased(),
}
BEFORE = ["AcquireWriter", "OpenSource", "ValidateRefit"]


@dataclass
class Scripted:
    """Answers what it is asked, or fails at one kind of command; `told` are the names of what came, in order."""

    peer: Peer
    fails_at: type[Request] | None = None
    code: ErrorCode = ErrorCode.REFIT_FAILED
    restorable: bool = True
    status: Status = STATUS
    told: list[str] = field(default_factory=list)

    def answer(self, asked: Asked) -> None:
        if not isinstance(asked.body, GetStatus | GetManifest):
            self.told.append(type(asked.body).__name__)
        if type(asked.body) is self.fails_at:
            asked.fail(self.code)
        elif isinstance(asked.body, CommitRefit):
            held = RefitHeld(refit=5, version=4, digest=None)
            asked.reply(held if asked.body.hold else RefitCommitted(report=REPORT))
        elif isinstance(asked.body, ValidateRefit) and not self.restorable:
            asked.reply(RefitValidated(version=4, path="plan", restorable_version=None, milliseconds=1.0))
        elif isinstance(asked.body, GetStatus):
            asked.reply(self.status)
        else:
            asked.reply(ANSWERS[type(asked.body)])


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[Scripted]]:
    with ExitStack() as stack:
        scripted = []
        for number in range(3):
            peer = Peer(endpoint_in(directory_in(tmp_path, number)))
            scripted.append(Scripted(peer))
            peer.answer = scripted[-1].answer
            stack.enter_context(running(peer))
        yield scripted


@pytest.fixture
def weights() -> torch.nn.Module:
    return share_parameters(torch.nn.Linear(2, 2))


def connect(daemons: list[Scripted], on_failure: OnFailure) -> Fleet:
    return Fleet.connect([daemon.peer.endpoint for daemon in daemons], on_failure=on_failure)


def test_each_commits_by_itself_with_leave_out(daemons: list[Scripted], weights: torch.nn.Module) -> None:
    """Validated, then one message; the version is one above the highest that is served, for all."""
    with connect(daemons, "leave_out") as fleet:
        report = fleet.refit(weights)
        assert fleet.version == REPORT.version == SERVED + 1
    assert [daemon.told for daemon in daemons] == [[*BEFORE, "CommitRefit"]] * 3
    assert sorted(report.reports) == sorted(daemon.peer.endpoint for daemon in daemons)


def test_all_write_before_one_publishes_with_restore(daemons: list[Scripted], weights: torch.nn.Module) -> None:
    with connect(daemons, "restore") as fleet:
        fleet.refit(weights)
    assert [daemon.told for daemon in daemons] == [[*BEFORE, "CommitRefit", "FinishRefit"]] * 3


@pytest.mark.parametrize("on_failure", ["leave_out", "restore"])
@pytest.mark.parametrize("code", [ErrorCode.NOT_FINITE, ErrorCode.WRITER_BUSY])
def test_a_request_that_one_refuses_is_done_by_none(
    daemons: list[Scripted], weights: torch.nn.Module, on_failure: OnFailure, code: ErrorCode
) -> None:
    """Nobody hears of a commit."""
    daemons[1].fails_at, daemons[1].code = ValidateRefit, code
    with connect(daemons, on_failure) as fleet, pytest.raises(FleetRefitRefused) as refused:
        fleet.refit(weights)
    assert [daemon.told for daemon in daemons] == [BEFORE] * 3
    assert {name: error.code for name, error in refused.value.errors.items()} == {daemons[1].peer.endpoint: code}


def test_what_one_daemon_cannot_do_now_is_its_own_affair(daemons: list[Scripted], weights: torch.nn.Module) -> None:
    """One that drains is left out, and takes part in the next refit by itself."""
    daemons[1].fails_at, daemons[1].code = ValidateRefit, ErrorCode.DRAINING
    with connect(daemons, "leave_out") as fleet:
        report = fleet.refit(weights)
        assert {name: error.code for name, error in report.left_out.items()} == {
            daemons[1].peer.endpoint: ErrorCode.DRAINING
        }
        daemons[1].fails_at = None
        assert not fleet.refit(weights, version=REPORT.version).left_out


def test_with_restore_all_must_keep_their_weights(daemons: list[Scripted], weights: torch.nn.Module) -> None:
    """Else an abort could not bring them back; it is found before anything is written."""
    daemons[2].restorable = False
    with connect(daemons, "restore") as fleet, pytest.raises(FleetRefitRefused, match="keep_last") as refused:
        fleet.refit(weights)
    assert refused.value.code is ErrorCode.NOTHING_TO_RESTORE
    assert [daemon.told for daemon in daemons] == [BEFORE] * 3


def test_one_that_fails_to_write_takes_the_others_back(daemons: list[Scripted], weights: torch.nn.Module) -> None:
    """They are told to abort, and nobody to publish."""
    daemons[0].fails_at = CommitRefit
    with connect(daemons, "restore") as fleet:
        with pytest.raises(FleetRefitFailed) as failed:
            fleet.refit(weights)
        assert fleet.version == SERVED
    assert list(failed.value.errors) == [daemons[0].peer.endpoint]
    assert daemons[0].told == [*BEFORE, "CommitRefit"]
    assert [daemon.told for daemon in daemons[1:]] == [[*BEFORE, "CommitRefit", "AbortRefit"]] * 2


@pytest.mark.parametrize(("on_failure", "step"), [("leave_out", CommitRefit), ("restore", FinishRefit)])
def test_one_that_fails_after_the_decision_is_left_out(
    daemons: list[Scripted], weights: torch.nn.Module, on_failure: OnFailure, step: type[Request]
) -> None:
    """The others serve the new version, and the report names it."""
    daemons[0].fails_at = step
    with connect(daemons, on_failure) as fleet:
        report = fleet.refit(weights)
        assert fleet.version == report.version
    assert list(report.left_out) == [daemons[0].peer.endpoint]
    assert len(report.reports) == 2
    assert not any("AbortRefit" in daemon.told for daemon in daemons[1:])


def test_when_all_fail_there_is_no_version(daemons: list[Scripted], weights: torch.nn.Module) -> None:
    for daemon in daemons:
        daemon.fails_at = CommitRefit
    with connect(daemons, "leave_out") as fleet:
        with pytest.raises(FleetRefitFailed) as failed:
            fleet.refit(weights)
        assert len(failed.value.errors) == 3
        assert fleet.version == SERVED


def test_a_partial_refit_follows_another_trainers(daemons: list[Scripted], weights: torch.nn.Module) -> None:
    """All serve its version, which this fleet sees now: nobody is behind."""
    with connect(daemons, "leave_out") as fleet:
        for daemon in daemons:
            daemon.status = msgspec.structs.replace(STATUS, version=SERVED + 5)
        assert not fleet.refit(weights, only=["weight"]).left_out
        assert fleet.version == SERVED + 5


def test_one_that_the_caller_left_out_hears_nothing(daemons: list[Scripted], weights: torch.nn.Module) -> None:
    """Until it is taken in; a fleet of none is refused."""
    with connect(daemons, "leave_out") as fleet:
        fleet.leave_out(daemons[2].peer.endpoint)
        fleet.refit(weights)
        assert daemons[2].told == []
        for daemon in daemons:
            fleet.leave_out(daemon.peer.endpoint)
        with pytest.raises(NoMember, match="take_in"):
            fleet.refit(weights)
        fleet.take_in(daemons[2].peer.endpoint)
        fleet.refit(weights)
        assert daemons[2].told == [*BEFORE, "CommitRefit"]
        with pytest.raises(KeyError):
            fleet.leave_out("ipc:///a/stranger")


def test_a_hold_without_an_answer_is_given_up_with_the_role(tmp_path: Path, weights: torch.nn.Module) -> None:
    """Whether the daemon holds it is unknown, and so is its number; releasing the role aborts it either way."""
    shared = shared_module(weights)
    assert shared is not None

    async def scene(endpoint: str) -> None:
        async with AsyncDaemon.connect(endpoint) as daemon:
            refit = daemon.one_refit(0.2)
            await refit.enter()
            await refit.open(shared.memory, "inplace", shared.tensors)
            with pytest.raises(RequestTimedOut) as unknown:
                await refit.hold(None, {})
            await refit.abort(unknown.value)
            await refit.leave()

    peer = Peer(endpoint_in(tmp_path))
    told: list[str] = []

    def answer(asked: Asked) -> None:
        told.append(type(asked.body).__name__)
        if not isinstance(asked.body, CommitRefit):
            asked.reply(ANSWERS[type(asked.body)])

    peer.answer = answer
    with running(peer):
        asyncio.run(scene(peer.endpoint))
    assert told == ["AcquireWriter", "OpenSource", "CommitRefit", "ReleaseWriter"]
