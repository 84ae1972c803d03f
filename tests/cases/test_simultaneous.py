"""Commands that arrive together: one of them goes first, both are answered, and nothing stays shut."""

from __future__ import annotations

import os

import pytest
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AcquireWriter,
    ApplyBucket,
    BeginRefit,
    BucketApplied,
    CommitRefit,
    Failed,
    Goodbye,
    OpenSource,
    RefitBegan,
    RefitCommitted,
    SessionClosed,
    Sleep,
    SleepStateChanged,
    SourceOpened,
    WriterAcquired,
)
from refit_protocol.states import EngineState
from refit_protocol.tensors import BucketPiece, TensorShape
from refit_trainer import Daemon, RefitdError, Sampling
from tests.canary import unharmed
from tests.conftest import PROMPT
from tests.daemon_process import DaemonProcess
from tests.lending import exported
from tests.wire import RawClient, raw_client

# More than the engine takes at a time, so that they run for a while.
MANY = 200


def opened(client: RawClient, model: PreTrainedModel, kind: str) -> tuple[int, int]:
    """The writer's epoch, and the source that the model's own memory is."""
    shared = exported(model)
    epoch = client.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
    tensors = shared.tensors if kind == "inplace" else []
    command = OpenSource(epoch=epoch, kind=kind, segments=shared.memory.segments, tensors=tensors)  # type: ignore[arg-type]
    return epoch, client.ask(command, SourceOpened).source


@pytest.mark.parametrize("sleep_first", [True, False])
def test_sleep_and_commit_together_leave_nothing_shut(
    daemon: Daemon, writer: RawClient, model: PreTrainedModel, sleep_first: bool
) -> None:
    """Whichever comes first is done, the other done or refused; afterwards the engine can be woken and serves."""
    epoch, source = opened(writer, model, "inplace")
    commands = [Sleep(level=1), CommitRefit(epoch=epoch, source=source)]
    for command in commands if sleep_first else reversed(commands):
        writer.post(command)
    replies = [writer.receive().body for _ in commands]
    assert all(isinstance(reply, SleepStateChanged | RefitCommitted | Failed) for reply in replies)
    assert any(not isinstance(reply, Failed) for reply in replies)
    assert daemon.wake_up().servable
    assert daemon.status().state is EngineState.READY


def test_two_commits_together_are_one_and_a_refusal_to_be_retried(writer: RawClient, model: PreTrainedModel) -> None:
    """The second is told that a refit is in progress, or comes after it: never an untyped end."""
    epoch, source = opened(writer, model, "inplace")
    for _ in range(2):
        writer.post(CommitRefit(epoch=epoch, source=source))
    replies = [writer.receive().body for _ in range(2)]
    refused = [reply for reply in replies if isinstance(reply, Failed)]
    assert len(refused) <= 1
    assert all(reply.code is ErrorCode.REFIT_IN_PROGRESS and reply.retryable for reply in refused)


def test_an_overrun_deadline_ends_the_refit_and_not_the_engine(
    daemon: Daemon, daemon_process: DaemonProcess, writer: RawClient, model: PreTrainedModel
) -> None:
    """A bucket refit that is left lying is undone when its deadline is over; the daemon serves on."""
    daemon.refit(model)
    daemon.release_writer()
    with unharmed(daemon):
        epoch, source = opened(writer, model, "bucket")
        tensors = exported(model).tensors
        shapes = [TensorShape(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape) for tensor in tensors]
        begin = BeginRefit(epoch=epoch, source=source, tensors=shapes, deadline_seconds=1.0)
        refit = writer.ask(begin, RefitBegan).refit
        piece = BucketPiece(name=tensors[0].name, first=0, count=8, offset_bytes=0)
        writer.ask(ApplyBucket(epoch=epoch, refit=refit, bucket=0, pieces=[piece]), BucketApplied)
        while daemon.status().state is not EngineState.READY:
            assert daemon_process.process.poll() is None
    late = writer.refused(CommitRefit(epoch=epoch, source=source, deadline_seconds=0.0))
    assert late.code in (ErrorCode.DEADLINE_EXCEEDED, ErrorCode.UNKNOWN_SOURCE)


@pytest.mark.parametrize("how", ["takeover", "goodbye"])
def test_a_commit_that_waits_for_requests_ends_with_its_writer(
    daemon: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel, how: str
) -> None:
    """The next writer is not told that a refit is in progress, and the requests run on as if there had been none."""
    with raw_client(daemon_process.endpoint) as before, raw_client(daemon_process.endpoint) as after:
        before.hello(pid=os.getpid())
        after.hello(pid=os.getpid())
        epoch, source = opened(before, model, "inplace")
        with daemon.stream([PROMPT] * MANY, Sampling(max_tokens=240, ignore_eos=True)) as running:
            next(running)
            before.post(CommitRefit(epoch=epoch, source=source, policy="finish"))
            while daemon.status().state is not EngineState.REFITTING:
                assert daemon.status().running_requests
            if how == "goodbye":
                before.ask(Goodbye(), SessionClosed)
                before.session = None
            epoch, source = opened(after, model, "inplace")
            assert daemon.status().running_requests, "the takeover waited for the requests"
            committed = after.ask(CommitRefit(epoch=epoch, source=source, policy="keep"), RefitCommitted)
        outcome = before.receive().body
        assert isinstance(outcome, Failed)
        assert outcome.code is (ErrorCode.REFIT_FAILED if how == "takeover" else ErrorCode.CANCELLED)
        assert daemon.status().version == committed.report.version


def test_no_version_can_be_the_last(daemon: Daemon, model: PreTrainedModel) -> None:
    """A trainer's slip must not end refits for ever: the upper half of the numbers is not for choosing."""
    with unharmed(daemon):
        for version in (2**63, 2**64 - 1):
            with pytest.raises(RefitdError) as refused:
                daemon.refit(model, version=version)
            assert refused.value.code is ErrorCode.LIMIT_EXCEEDED
    assert daemon.refit(model).version < 2**63
