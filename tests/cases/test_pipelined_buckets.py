"""A trainer that waits for no bucket's answer before it sends the next one and the end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AbortRefit,
    AcquireWriter,
    ApplyBucket,
    BeginRefit,
    BucketApplied,
    Failed,
    FinishRefit,
    OpenSource,
    RefitAborted,
    RefitBegan,
    RefitCommitted,
    RefitHeld,
    SourceOpened,
    WriterAcquired,
)
from refit_protocol.states import EngineState
from refit_trainer import Daemon
from refit_trainer.backends import Buckets, backend_for
from refit_trainer.layouts import Layout, layout_of
from refit_trainer.packing import FilledBucket, pack
from tests.canary import unharmed
from tests.daemon_process import DaemonProcess
from tests.lending import HostBell
from tests.trainers import tensors_of
from tests.wire import RawClient, raw_client

BUCKETS, BUCKET_BYTES = 24, 128 << 10


class Trainer:
    """Has packed a whole model, of other weights than those served, into buckets that are each used once."""

    def __init__(self, wire: RawClient, memory: Buckets) -> None:
        self.bell = HostBell()
        self.tensors = tensors = dict(tensors_of(1))
        self.wire = wire
        self.memory = memory
        self.layout: Layout = layout_of(tensors.items())
        self.filled: list[FilledBucket] = list(pack(tensors.items(), self.layout, memory.views, 1000))
        assert len(self.filled) <= BUCKETS
        self.epoch = wire.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
        command = OpenSource(epoch=self.epoch, kind="bucket", segments=memory.segments, bell=self.bell.segment)
        self.source = wire.ask(command, SourceOpened).source

    def begin(self, *, again: bool = False) -> BeginRefit:
        tensors = [] if again else [*self.layout.values()]
        return BeginRefit(epoch=self.epoch, source=self.source, tensors=tensors, again=again)

    def numbered(self, refit: int | None, number: int, *, again: bool = False) -> ApplyBucket:
        """The bucket of this number, without its pieces where they were said before."""
        filled = self.filled[number]
        pieces = [] if again else filled.pieces
        return ApplyBucket(epoch=self.epoch, refit=refit, bucket=filled.bucket, pieces=pieces, layout=number)

    def repack(self, seed: int) -> None:
        """The same tensors with other values in the same places."""
        self.tensors = dict(tensors_of(seed))
        assert list(pack(self.tensors.items(), self.layout, self.memory.views, 1000)) == self.filled

    def post_all(self, refit: int, *, bad_at: int | None = None, done: int | None = None) -> int:
        """Every bucket, one that brings an element twice before the one of this number, and the end; returns how many
        messages that were."""
        buckets = [*self.filled]
        if bad_at is not None:
            piece = msgspec.structs.replace(buckets[bad_at].pieces[0], first=0, count=8)
            again = msgspec.structs.replace(piece, offset_bytes=piece.offset_bytes + 1024)
            buckets.insert(bad_at, FilledBucket(buckets[bad_at].bucket, [piece, again]))
        for filled in buckets:
            command = ApplyBucket(epoch=self.epoch, refit=refit, bucket=filled.bucket, pieces=filled.pieces)
            self.wire.post(command)
        self.wire.post(FinishRefit(epoch=self.epoch, refit=refit, done=done))
        return len(buckets) + 1


@pytest.fixture
def trainer(daemon: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel) -> Iterator[Trainer]:
    daemon.refit(model)
    daemon.release_writer()
    memory = backend_for("cpu").buckets(BUCKETS, BUCKET_BYTES, torch.device("cpu"))
    with raw_client(daemon_process.endpoint) as wire:
        wire.hello(pid=os.getpid())
        yield Trainer(wire, memory)
    memory.close()


def test_buckets_sent_at_once_are_applied_in_order_and_finished(daemon: Daemon, trainer: Trainer) -> None:
    """Twice: the second time the same tensors are only said to come again."""
    for again in (False, True):
        began = trainer.wire.ask(trainer.begin(again=again), RefitBegan)
        replies = [trainer.wire.receive().body for _ in range(trainer.post_all(began.refit))]
        *applied, committed = replies
        assert all(isinstance(reply, BucketApplied) for reply in applied)
        assert isinstance(committed, RefitCommitted)
        assert daemon.verify(trainer.tensors, full=True)


def test_a_whole_refit_can_be_sent_before_any_answer(daemon: Daemon, trainer: Trainer) -> None:
    """But for its end, which needs the number; buckets without one are for the refit that was begun last."""
    for again in (False, True):
        trainer.wire.post(trainer.begin(again=again))
        for number in range(len(trainer.filled)):
            trainer.wire.post(trainer.numbered(None, number, again=again))
        began, *applied = [trainer.wire.receive().body for _ in range(1 + len(trainer.filled))]
        assert isinstance(began, RefitBegan)
        assert [(reply.refit, reply.bucket) for reply in applied if isinstance(reply, BucketApplied)] == [
            (began.refit, filled.bucket) for filled in trainer.filled
        ]
        trainer.wire.ask(FinishRefit(epoch=trainer.epoch, refit=began.refit), RefitCommitted)
        assert daemon.verify(trainer.tensors, full=True)
        trainer.repack(2)


def test_the_end_is_told_by_the_bell(trainer: Trainer) -> None:
    """Of a refit that is held, too, whose publishing moves nothing; but not of one that has failed."""
    bell = trainer.bell
    for done, bad_at in ((2, None), (4, 3), (6, None)):
        began = trainer.wire.ask(trainer.begin(), RefitBegan)
        for _ in range(trainer.post_all(began.refit, bad_at=bad_at, done=done)):
            trainer.wire.receive()
        assert bell.done() == (done if bad_at is None else 2)
    began = trainer.wire.ask(trainer.begin(), RefitBegan)
    for number in range(len(trainer.filled)):
        trainer.wire.ask(trainer.numbered(began.refit, number), BucketApplied)
    trainer.wire.ask(FinishRefit(epoch=trainer.epoch, refit=began.refit, hold=True, done=8), RefitHeld)
    assert bell.done() == 8
    trainer.wire.ask(FinishRefit(epoch=trainer.epoch, refit=began.refit, done=10), RefitCommitted)
    assert bell.done() == 8


def test_an_end_that_cannot_be_told_is_refused_and_may_be_sent_again(daemon: Daemon, trainer: Trainer) -> None:
    """The trainer would wait for it; the refit is still under way."""
    began = trainer.wire.ask(trainer.begin(), RefitBegan)
    trainer.post_all(began.refit, done=3)
    replies = [trainer.wire.receive().body for _ in range(len(trainer.filled) + 1)]
    (refused,) = [reply for reply in replies if isinstance(reply, Failed)]
    assert refused.code is ErrorCode.INVALID_DESCRIPTOR
    trainer.wire.ask(FinishRefit(epoch=trainer.epoch, refit=began.refit), RefitCommitted)
    assert daemon.verify(trainer.tensors, full=True)


def test_buckets_behind_a_begin_that_is_refused_are_refused(daemon: Daemon, trainer: Trainer) -> None:
    """So are those of a session that has begun nothing, or whose refit has ended; nothing is written, least of all into
    the refit that made the begin fail."""
    with unharmed(daemon):
        assert trainer.wire.refused(trainer.numbered(None, 0)).code is ErrorCode.UNKNOWN_REFIT
        began = trainer.wire.ask(trainer.begin(), RefitBegan)
        trainer.wire.post(trainer.begin())
        trainer.wire.post(trainer.numbered(None, 0))
        codes = [reply.code for reply in (trainer.wire.receive().body, trainer.wire.receive().body)]
        assert codes == [ErrorCode.REFIT_IN_PROGRESS, ErrorCode.UNKNOWN_REFIT]
        aborted = trainer.wire.ask(AbortRefit(epoch=trainer.epoch, refit=began.refit), RefitAborted)
        assert aborted.state is EngineState.READY
        began = trainer.wire.ask(trainer.begin(), RefitBegan)
        trainer.wire.ask(AbortRefit(epoch=trainer.epoch, refit=began.refit), RefitAborted)
        assert trainer.wire.refused(trainer.numbered(None, 0)).code is ErrorCode.UNKNOWN_REFIT


def test_pieces_that_have_a_number_are_said_once(daemon: Daemon, trainer: Trainer) -> None:
    """The second refit's buckets come without them, in another order, and hold other values."""
    order = range(len(trainer.filled))
    for again in (False, True):
        began = trainer.wire.ask(trainer.begin(again=again), RefitBegan)
        for number in reversed(order) if again else order:
            trainer.wire.ask(trainer.numbered(began.refit, number, again=again), BucketApplied)
        trainer.wire.ask(FinishRefit(epoch=trainer.epoch, refit=began.refit), RefitCommitted)
        assert daemon.verify(trainer.tensors, full=True)
        trainer.repack(2)


def test_numbers_of_pieces_that_are_not_known_are_refused(daemon: Daemon, trainer: Trainer) -> None:
    """Never given, of another bucket, out of range, or given for tensors that were announced before."""
    with unharmed(daemon):
        began = trainer.wire.ask(trainer.begin(), RefitBegan)
        command = trainer.numbered(began.refit, 0, again=True)
        assert trainer.wire.refused(command).code is ErrorCode.INVALID_DESCRIPTOR
        for number in (-1, 4096):
            numbered = msgspec.structs.replace(command, pieces=trainer.filled[0].pieces, layout=number)
            assert trainer.wire.refused(numbered).code is ErrorCode.LIMIT_EXCEEDED
        trainer.wire.ask(trainer.numbered(began.refit, 0), BucketApplied)
        other = msgspec.structs.replace(command, bucket=1)
        assert trainer.wire.refused(other).code is ErrorCode.INVALID_DESCRIPTOR
        assert trainer.wire.refused(command).code is ErrorCode.INVALID_DESCRIPTOR, "it has come already"
    with unharmed(daemon):
        began = trainer.wire.ask(trainer.begin(), RefitBegan)
        command = trainer.numbered(began.refit, 0, again=True)
        assert trainer.wire.refused(command).code is ErrorCode.INVALID_DESCRIPTOR
        trainer.wire.ask(AbortRefit(epoch=trainer.epoch, refit=began.refit), RefitAborted)


@pytest.mark.parametrize("bad_at", [0, 3])
def test_a_bucket_that_fails_ends_the_refit_whatever_was_sent_behind_it(
    daemon: Daemon, trainer: Trainer, bad_at: int
) -> None:
    """Also the first one, before which nothing was written, and behind which nothing is: what was served before the
    refit is served after it."""
    with unharmed(daemon):
        began = trainer.wire.ask(trainer.begin(), RefitBegan)
        replies = [trainer.wire.receive().body for _ in range(trainer.post_all(began.refit, bad_at=bad_at))]
        refusals = {reply.code for reply in replies if isinstance(reply, Failed)}
        assert ErrorCode.INVALID_DESCRIPTOR in refusals
        assert refusals <= {ErrorCode.UNKNOWN_REFIT, ErrorCode.INVALID_DESCRIPTOR}
        assert not any(isinstance(reply, RefitCommitted) for reply in replies)


def test_a_bucket_behind_the_end_of_a_held_refit_is_refused(daemon: Daemon, trainer: Trainer) -> None:
    """The held weights stay what they are, unserved, until they are published or put back; before, such a bucket had
    them served as the version before."""
    with unharmed(daemon):
        began = trainer.wire.ask(trainer.begin(), RefitBegan)
        last = trainer.filled[-1]
        too_late = ApplyBucket(epoch=trainer.epoch, refit=began.refit, bucket=last.bucket, pieces=last.pieces)
        for filled in trainer.filled:
            trainer.wire.post(msgspec.structs.replace(too_late, bucket=filled.bucket, pieces=filled.pieces))
        trainer.wire.post(FinishRefit(epoch=trainer.epoch, refit=began.refit, hold=True))
        trainer.wire.post(too_late)
        *applied, held, refused = [trainer.wire.receive().body for _ in range(len(trainer.filled) + 2)]
        assert all(isinstance(reply, BucketApplied) for reply in applied)
        assert isinstance(held, RefitHeld)
        assert isinstance(refused, Failed)
        assert refused.code is ErrorCode.NOT_ALLOWED_NOW
        aborted = trainer.wire.ask(AbortRefit(epoch=trainer.epoch, refit=began.refit), RefitAborted)
        assert aborted.state is EngineState.READY


def test_what_was_committed_is_not_said_to_be_aborted(daemon: Daemon, trainer: Trainer) -> None:
    """An abort that was sent behind the end comes too late."""
    began = trainer.wire.ask(trainer.begin(), RefitBegan)
    sent = trainer.post_all(began.refit)
    trainer.wire.post(AbortRefit(epoch=trainer.epoch, refit=began.refit))
    *_, committed, refused = [trainer.wire.receive().body for _ in range(sent + 1)]
    assert isinstance(committed, RefitCommitted)
    assert isinstance(refused, Failed)
    assert refused.code is ErrorCode.UNKNOWN_REFIT
    assert daemon.status().version == committed.report.version


def test_nothing_can_come_again_that_never_came(daemon: Daemon, trainer: Trainer) -> None:
    """A refusal before anything is written, and the gate stays open."""
    with unharmed(daemon):
        assert trainer.wire.refused(trainer.begin(again=True)).code is ErrorCode.INVALID_DESCRIPTOR
