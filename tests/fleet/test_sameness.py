"""Whether the daemons of a fleet serve one model: told when it connects, and of whoever comes later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import AcquireWriter, GetManifest, GetStatus, Manifest, ManifestTensor, Request, Status
from refit_protocol.states import EngineState
from refit_trainer import Fleet, FleetMismatch, FleetRefitRefused, MemberState, OtherModel, RefitdError
from refit_trainer.fleet.sameness import RequireSame, model_of, other_model, other_weights
from tests.fleet.conftest import directory_in
from tests.fleet.test_refits import STATUS
from tests.trainer.peer import Asked, Peer, endpoint_in, running
from tests.waiting import until

TENSORS = [
    ManifestTensor(name="embed.weight", dtype="bfloat16", shape=(512, 128)),
    ManifestTensor(name="norm.weight", dtype="bfloat16", shape=(128,)),
]
NARROW = [TENSORS[0], msgspec.structs.replace(TENSORS[1], shape=(64,))]
DIFFERENCES = {
    "it has no tensor 'norm.weight', the others have": TENSORS[:1],
    "its 'norm.weight' has shape [64], the others' [128]": NARROW,
    "it has a tensor 'bias', the others have not": [*TENSORS, msgspec.structs.replace(TENSORS[1], name="bias")],
}


@dataclass
class Serving:
    """A daemon that says what it serves; `told` is what it was asked."""

    peer: Peer
    tensors: list[ManifestTensor] = field(default_factory=lambda: TENSORS)
    status: Status = STATUS
    told: list[Request] = field(default_factory=list)

    def answer(self, asked: Asked) -> None:
        self.told.append(asked.body)
        if isinstance(asked.body, GetManifest):
            asked.reply(Manifest(tensors=self.tensors))
        elif not isinstance(asked.body, GetStatus):
            asked.fail(ErrorCode.WRITER_BUSY)
        else:
            asked.reply(msgspec.structs.replace(self.status, epoch=self.peer.epoch))


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[Serving]]:
    with ExitStack() as stack:
        serving = []
        for number in range(3):
            peer = stack.enter_context(running(Peer(endpoint_in(directory_in(tmp_path, number)))))
            serving.append(Serving(peer))
            peer.answer = serving[-1].answer
        yield serving


def connect(daemons: list[Serving], require_same: RequireSame = "weights") -> Fleet:
    return Fleet.connect([daemon.peer.endpoint for daemon in daemons], require_same=require_same)


def states(fleet: Fleet) -> list[MemberState]:
    return [member.state for member in fleet.status().members]


def come_back_with(odd: Serving, tensors: list[ManifestTensor]) -> None:
    odd.peer.stop()
    odd.tensors, odd.peer.epoch = tensors, 2
    odd.peer.start()
    odd.peer.wait_for_hellos(2)


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_difference_of_two_models_is_said(difference: str) -> None:
    """The first one there is, by name."""
    model, expected = (model_of(Manifest(tensors=tensors)) for tensors in (DIFFERENCES[difference], TENSORS))
    assert difference in str(other_model("llama", model, expected))


def test_engines_of_unlike_precision_serve_one_model() -> None:
    coarse = [msgspec.structs.replace(tensor, dtype="float16") for tensor in TENSORS]
    assert model_of(Manifest(tensors=coarse)) == model_of(Manifest(tensors=TENSORS))


def test_weights_are_compared_where_they_can_be() -> None:
    """Of one version, in one precision, by digests of one kind, while no refit is under way."""
    odd = msgspec.structs.replace(STATUS, digest="1")
    assert STATUS.model is not None
    incomparable = [
        msgspec.structs.replace(odd, digest=None),
        msgspec.structs.replace(odd, version=odd.version + 1),
        msgspec.structs.replace(odd, digest_mode="full"),
        msgspec.structs.replace(odd, state=EngineState.REFITTING),
        msgspec.structs.replace(odd, model=msgspec.structs.replace(STATUS.model, dtype="float16")),
    ]
    for other in incomparable:
        assert other_weights({"a": STATUS, "b": other}) == {}
    assert list(other_weights({"a": odd, "b": STATUS, "c": STATUS})) == ["a"]


def test_a_fleet_of_unlike_models_is_refused_and_the_odd_one_named(daemons: list[Serving]) -> None:
    """Before a refit, or tokens of one model under the name of another, can fail or deceive."""
    daemons[1].tensors = NARROW
    with pytest.raises(FleetMismatch, match=r"another model, tiny: its 'norm\.weight' has shape \[64\]") as refused:
        connect(daemons)
    assert list(refused.value.errors) == [daemons[1].peer.endpoint]
    assert not refused.value.retryable


def test_a_fleet_of_unlike_weights_under_one_version_is_refused(daemons: list[Serving]) -> None:
    """As where each was started with other weights, and nobody has refitted them; whoever will says so."""
    daemons[2].status = msgspec.structs.replace(STATUS, digest="1")
    with pytest.raises(FleetMismatch, match=f"other weights than the others as version {STATUS.version}") as refused:
        connect(daemons)
    assert list(refused.value.errors) == [daemons[2].peer.endpoint]
    with connect(daemons, "model") as fleet:
        assert states(fleet) == [MemberState.SERVING] * 3


def test_nothing_is_compared_where_nothing_need_be_the_same(daemons: list[Serving]) -> None:
    daemons[1].tensors = NARROW
    with connect(daemons, "nothing") as fleet:
        assert states(fleet) == [MemberState.SERVING] * 3
    assert not any(isinstance(asked, GetManifest) for daemon in daemons for asked in daemon.told)


def test_one_that_comes_back_with_another_model_takes_no_part(daemons: list[Serving]) -> None:
    """The fleet goes on without it, and says why."""
    with connect(daemons) as fleet:
        come_back_with(daemons[0], NARROW)
        assert states(fleet) == [MemberState.DOWN, MemberState.SERVING, MemberState.SERVING]
        assert isinstance(fleet.status().members[0].error, OtherModel)


def test_a_refit_does_not_go_by_another_model(daemons: list[Serving]) -> None:
    """What an iterator will yield is foreseen from those that take part; the role is taken at those only."""
    with connect(daemons) as fleet:
        come_back_with(daemons[0], NARROW)
        assert states(fleet)[0] is MemberState.DOWN
        before = len(daemons[0].told)
        with pytest.raises(FleetRefitRefused) as refused:
            fleet.refit(tensors())
        assert {type(error) for error in refused.value.errors.values()} == {OtherModel, RefitdError}
        with pytest.raises(RefitdError, match="writer_busy"):
            fleet.acquire_writer(takeover=True)
    assert {type(asked) for asked in daemons[0].told[before:]} == {GetStatus}
    assert isinstance(daemons[1].told[-1], AcquireWriter)


def test_why_a_daemon_takes_no_part_is_its_own_word(daemons: list[Serving]) -> None:
    """It is there, and neither dead nor hanging: it refused the session."""
    daemons[2].peer.refuses_hello = ErrorCode.SESSION_LIMIT
    with connect(daemons) as fleet, pytest.raises(FleetRefitRefused) as refused:
        fleet.refit(tensors())
    assert "session_limit" in str(refused.value.errors[daemons[2].peer.endpoint])


def test_daemons_that_go_away_under_an_iterator_are_told(daemons: list[Serving]) -> None:
    """While it makes its first tensor nobody is left who could say what else belongs to the model."""

    def last_words() -> Iterator[tuple[str, torch.Tensor]]:
        for daemon in daemons:
            daemon.peer.stop()
        until(lambda: not any(member.is_up for member in fleet._fleet._members.all.values()), "the ends of all three")
        yield from tensors()

    endpoints = [daemon.peer.endpoint for daemon in daemons]
    with Fleet.connect(endpoints, patience_seconds=0.1) as fleet:
        try:
            with pytest.raises(FleetRefitRefused) as refused:
                fleet.refit(last_words())
        finally:
            for daemon in daemons:
                daemon.peer.start()
        assert sorted(refused.value.errors) == sorted(endpoints)


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """What `TENSORS` describe."""
    return ((tensor.name, torch.ones(tensor.shape, dtype=torch.bfloat16)) for tensor in TENSORS)


def test_what_a_daemon_serves_is_asked_once(daemons: list[Serving]) -> None:
    """It cannot change in its life, and a manifest is long."""
    with connect(daemons) as fleet:
        for _ in range(3):
            fleet.status()
    assert [sum(isinstance(asked, GetManifest) for asked in daemon.told) for daemon in daemons] == [1, 1, 1]
