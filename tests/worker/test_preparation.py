"""What was prepared in a worker ends with whatever comes next. No device waits here: something says that it does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import MemfdSegment, Segment, SourceTensor
from refitd.worker.attest import Attest
from refitd.worker.opening import open_source
from refitd.worker.preparation import Preparation
from refitd.worker.state import WorkerState
from tests.worker.conftest import SOURCE
from tests.worker.engines import LoadedWorker
from tests.worker.trainers import ExportedTensors

UNKNOWN = 99


class Waiting:
    """Prepared for another refit than those that come."""

    def __init__(self, *, ran: bool = False, failure: Exception | None = None) -> None:
        self._ran = ran
        self._failure = failure
        self.ended = 0

    def is_for(self, *_: object, **__: object) -> bool:
        return False

    def stand_by(self) -> None:
        raise AssertionError("it is prepared for a trainer that says when")

    def commit(self, _release: int | None) -> dict[str, Any]:
        raise AssertionError("it is for another refit")

    def settle(self) -> bool:
        self.ended += 1
        if self._failure is not None:
            raise self._failure
        return self._ran


def state_of(worker: LoadedWorker) -> WorkerState:
    state = worker.worker.refitd_kept_state
    assert isinstance(state, WorkerState)
    return state


@pytest.mark.parametrize("ran", [False, True])
def test_a_refused_commit_leaves_nothing_waiting(opened: LoadedWorker, ran: bool) -> None:
    """The engine goes on then: a late ring would write into its steps."""
    waiting = Waiting(ran=ran)
    state_of(opened).preparation = waiting
    code, _, wrote = opened.refused("refitd_commit", UNKNOWN)
    assert (code, wrote, waiting.ended) == ("unknown_source", ran, 1)


def test_what_cannot_be_ended_may_have_written(opened: LoadedWorker) -> None:
    """Nobody knows, so nobody may go on with what is there."""
    state_of(opened).preparation = Waiting(failure=RuntimeError("the device is gone"))
    code, _, wrote = opened.refused("refitd_abort")
    assert (code, wrote) == ("refit_failed", True)
    opened.call("refitd_commit", SOURCE)


@pytest.mark.parametrize("ran", [False, True])
def test_what_gives_way_is_over_unless_it_was_rung_for(opened: LoadedWorker, ran: bool) -> None:
    """Then its commit is still to come, and finds it."""
    waiting = Waiting(ran=ran)
    state = state_of(opened)
    state.preparation = waiting
    assert opened.call("refitd_give_way")["wrote"] is ran
    assert (state.preparation is waiting, state.wrote) == (ran, ran)
    opened.call("refitd_commit", SOURCE)
    assert (state.preparation, state.wrote) == (None, False)


def test_nothing_has_to_give_way_twice(opened: LoadedWorker) -> None:
    """A worker that had nothing standing by, since its processors copy when they are told to."""
    assert opened.call("refitd_stand_by", SOURCE, "sampled", 1)["waiting"] is False
    for _ in range(2):
        assert opened.call("refitd_give_way")["wrote"] is False


def test_nothing_stands_by_for_a_source_that_is_not_there(opened: LoadedWorker) -> None:
    code, _, wrote = opened.refused("refitd_stand_by", UNKNOWN, "sampled", 1)
    assert (code, wrote) == ("unknown_source", False)


class Copies:
    """Those of a preparation: they run when they are told to, and are found wrong."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.behind = (self._refuse, dict)

    def _refuse(self) -> None:
        raise ProtocolError(ErrorCode.ATTEST_FAILED, "the engine holds something else")

    def run(self) -> None:
        self.said.append("run")

    def tell_arrival(self) -> None:
        self.said.append("arrived")

    def settle(self) -> bool:
        self.said.append("settled")
        return "run" in self.said


def test_what_fails_behind_the_copy_leaves_nothing_under_way(opened: LoadedWorker) -> None:
    """The trainer is not told of an arrival, and its memory is read no more."""
    state, copies = state_of(opened), Copies()
    compiled = SimpleNamespace(program=SimpleNamespace(wait=lambda **_: None))
    preparation = Preparation(state, state.inplace(SOURCE), cast(Any, compiled), Attest.SAMPLED, cast(Any, copies))
    with pytest.raises(ProtocolError, match="something else"):
        preparation.commit(None)
    assert copies.said == ["run", "settled"]
    assert state.wrote
    opened.call("refitd_commit", SOURCE)


class Bell:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def without_a_tensor(trainer: ExportedTensors) -> tuple[list[Segment], list[SourceTensor]]:
    return segments_of(trainer), tensors_of(trainer)[1:]


def without_memory(trainer: ExportedTensors) -> tuple[list[Segment], list[SourceTensor]]:
    return segments_of(trainer, fd=10**6), tensors_of(trainer)


def segments_of(trainer: ExportedTensors, **changes: int) -> list[Segment]:
    described = {key: value for key, value in trainer.segment.items() if key != "kind"}
    return [MemfdSegment(**{**described, **changes})]


def tensors_of(trainer: ExportedTensors) -> list[SourceTensor]:
    return msgspec.convert(trainer.described, list[SourceTensor])


@pytest.mark.parametrize("lent", [without_a_tensor, without_memory])
def test_a_bell_goes_with_the_source_that_is_refused(
    opened: LoadedWorker,
    trainer: ExportedTensors,
    lent: Callable[[ExportedTensors], tuple[list[Segment], list[SourceTensor]]],
) -> None:
    """Whatever it is refused for; nothing of it stays registered with the driver."""
    bell = Bell()
    with pytest.raises(ProtocolError):
        open_source(state_of(opened), UNKNOWN, "inplace", *lent(trainer), "auto", cast(Any, bell))
    assert bell.closed == 1
    whole = segments_of(trainer), tensors_of(trainer)
    open_source(state_of(opened), UNKNOWN, "inplace", *whole, "auto", cast(Any, bell))
    assert bell.closed == 1
    opened.call("refitd_close_source", UNKNOWN)
    assert bell.closed == 2
