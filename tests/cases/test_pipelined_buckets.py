"""A trainer that waits for no bucket's answer before it sends the next one and the end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AcquireWriter,
    ApplyBucket,
    BeginRefit,
    BucketApplied,
    Failed,
    FinishRefit,
    OpenSource,
    RefitBegan,
    RefitCommitted,
    SourceOpened,
    WriterAcquired,
)
from refit_trainer import Daemon
from refit_trainer.backends import Buckets, backend_for
from refit_trainer.layouts import Layout, layout_of
from refit_trainer.names import checkpoint_tensors
from refit_trainer.packing import FilledBucket, pack
from tests.canary import unharmed
from tests.daemon_process import DaemonProcess
from tests.wire import RawClient, raw_client

BUCKETS, BUCKET_BYTES = 24, 128 << 10


class Trainer:
    """Has packed a whole model into buckets that are each used once."""

    def __init__(self, wire: RawClient, memory: Buckets, model: PreTrainedModel) -> None:
        tensors = checkpoint_tensors(model)
        self.wire = wire
        self.layout: Layout = layout_of(tensors.items())
        self.filled: list[FilledBucket] = list(pack(tensors.items(), self.layout, memory.views, 1000))
        assert len(self.filled) <= BUCKETS
        self.epoch = wire.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
        command = OpenSource(epoch=self.epoch, kind="bucket", segments=memory.segments)
        self.source = wire.ask(command, SourceOpened).source

    def begin(self, *, again: bool = False) -> BeginRefit:
        tensors = [] if again else [*self.layout.values()]
        return BeginRefit(epoch=self.epoch, source=self.source, tensors=tensors, again=again)

    def post_all(self, refit: int, *, twice: int | None = None) -> int:
        """Every bucket, the one of this number twice, and the end; returns how many messages that were."""
        order = [*range(len(self.filled))]
        if twice is not None:
            order.insert(twice, twice)
        for number in order:
            filled = self.filled[number]
            command = ApplyBucket(epoch=self.epoch, refit=refit, bucket=filled.bucket, pieces=filled.pieces)
            self.wire.post(command)
        self.wire.post(FinishRefit(epoch=self.epoch, refit=refit))
        return len(order) + 1


@pytest.fixture
def trainer(daemon_process: DaemonProcess, model: PreTrainedModel) -> Iterator[Trainer]:
    memory = backend_for("cpu").buckets(BUCKETS, BUCKET_BYTES, torch.device("cpu"))
    with raw_client(daemon_process.endpoint) as wire:
        wire.hello(pid=os.getpid())
        yield Trainer(wire, memory, model)
    memory.close()


def test_buckets_sent_at_once_are_applied_in_order_and_finished(
    daemon: Daemon, trainer: Trainer, model: PreTrainedModel
) -> None:
    """Twice: the second time the same tensors are only said to come again."""
    for again in (False, True):
        began = trainer.wire.ask(trainer.begin(again=again), RefitBegan)
        replies = [trainer.wire.receive().body for _ in range(trainer.post_all(began.refit))]
        *applied, committed = replies
        assert all(isinstance(reply, BucketApplied) for reply in applied)
        assert isinstance(committed, RefitCommitted)
        assert daemon.verify(model, full=True)


def test_a_bucket_that_fails_ends_the_refit_whatever_was_sent_behind_it(daemon: Daemon, trainer: Trainer) -> None:
    """Elements that come twice are refused, nothing is committed, and what was served before is served again."""
    with unharmed(daemon):
        began = trainer.wire.ask(trainer.begin(), RefitBegan)
        replies = [trainer.wire.receive().body for _ in range(trainer.post_all(began.refit, twice=3))]
        refusals = {reply.code for reply in replies if isinstance(reply, Failed)}
        assert ErrorCode.INVALID_DESCRIPTOR in refusals
        assert refusals <= {ErrorCode.UNKNOWN_REFIT, ErrorCode.INVALID_DESCRIPTOR}
        assert not any(isinstance(reply, RefitCommitted) for reply in replies)


def test_nothing_can_come_again_that_never_came(daemon: Daemon, trainer: Trainer) -> None:
    """A refusal before anything is written, and the gate stays open."""
    with unharmed(daemon):
        assert trainer.wire.refused(trainer.begin(again=True)).code is ErrorCode.INVALID_DESCRIPTOR
