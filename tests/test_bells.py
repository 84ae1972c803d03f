"""Bells in `OpenSource`: one that nothing waits for, and those that are refused."""

from __future__ import annotations

import os

import pytest
from transformers import PreTrainedModel

from refit_protocol.bell import BELL_BYTES
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AcquireWriter,
    FinishRefit,
    GroupMember,
    OpenSource,
    PrepareRefit,
    RefitCommitted,
    RefitPrepared,
    SourceOpened,
    WriterAcquired,
)
from refit_protocol.tensors import CudaIpcSegment, MemfdSegment, Segment
from refit_trainer import Daemon
from refit_trainer.memory import Memfd
from tests.canary import unharmed
from tests.lending import exported, lent
from tests.wire import RawClient


def test_a_bell_that_nothing_waits_for_is_left_alone(daemon: Daemon, writer: RawClient, model: PreTrainedModel) -> None:
    """A processor copies when it is told to: a good bell is taken, and there is nothing to ring for."""
    bell = Memfd("bell", BELL_BYTES)
    epoch = writer.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
    source = writer.ask(lent(model, epoch, bell.segment), SourceOpened).source
    for _ in range(2):
        prepared = writer.ask(PrepareRefit(epoch=epoch, source=source), RefitPrepared)
        assert (prepared.ring, prepared.workers) == (None, 1)
        writer.ask(FinishRefit(epoch=epoch, refit=prepared.refit), RefitCommitted)
    assert not bell.view.any()
    assert daemon.verify(model, full=True)


ON_A_DEVICE = CudaIpcSegment(pid=os.getpid(), device_uuid="GPU-0", handle=bytes(64), size_bytes=BELL_BYTES)


def of(size_bytes: int = BELL_BYTES, pid: int | None = None) -> MemfdSegment:
    return MemfdSegment(pid=os.getpid() if pid is None else pid, fd=3, inode=3, size_bytes=size_bytes)


@pytest.mark.parametrize(
    ("bell", "changes", "code"),
    [
        (of(BELL_BYTES - 1), {}, ErrorCode.INVALID_DESCRIPTOR),
        (of(BELL_BYTES + 1), {}, ErrorCode.INVALID_DESCRIPTOR),
        (of(pid=1), {}, ErrorCode.INVALID_DESCRIPTOR),
        (of(), {"member": GroupMember(group="g", rank=0, world_size=2)}, ErrorCode.INVALID_DESCRIPTOR),
        (ON_A_DEVICE, {}, ErrorCode.MALFORMED_MESSAGE),
    ],
    ids=["too small", "too large", "of another process", "of one rank", "on a device"],
)
def test_bad_bells_are_refused(
    daemon: Daemon,
    writer: RawClient,
    model: PreTrainedModel,
    bell: Segment,
    changes: dict[str, object],
    code: ErrorCode,
) -> None:
    """Before any worker sees them."""
    with unharmed(daemon):
        epoch = writer.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
        shared = exported(model)
        fields = {"kind": "inplace", "segments": shared.memory.segments, "tensors": shared.tensors, **changes}
        assert writer.refused(OpenSource(epoch=epoch, bell=bell, **fields)).code is code  # type: ignore[arg-type]
