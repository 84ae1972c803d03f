"""A dry run changes nothing, and a held refit is published by a second word or not at all."""

from __future__ import annotations

import os

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
    CommitRefit,
    FinishRefit,
    OpenSource,
    RefitAborted,
    RefitBegan,
    RefitCommitted,
    RefitHeld,
    RefitValidated,
    SourceOpened,
    ValidateRefit,
    WriterAcquired,
)
from refit_protocol.states import EngineState
from refit_protocol.tensors import DType, TensorShape
from refit_trainer import Daemon
from refit_trainer.backends import backend_for
from refit_trainer.layouts import layout_of
from refit_trainer.names import checkpoint_tensors
from refit_trainer.packing import pack
from refit_trainer.sharing import shared_module
from tests.canary import sing, unharmed
from tests.conftest import load_seed
from tests.daemon_process import DaemonProcess
from tests.wire import RawClient, raw_client


@pytest.fixture
def opened(daemon: Daemon, writer: RawClient, model: PreTrainedModel) -> tuple[int, int]:
    """(epoch, in-place source) of weights B in the shared model; the daemon serves weights A."""
    daemon.refit(model)
    load_seed(model, 1)
    shared = shared_module(model)
    assert shared is not None
    epoch = writer.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
    command = OpenSource(epoch=epoch, kind="inplace", segments=shared.memory.segments, tensors=shared.tensors)
    return epoch, writer.ask(command, SourceOpened).source


def wait_until_restored(daemon: Daemon) -> None:
    """Every look is a round trip; the test's own timeout bounds it."""
    while (state := daemon.status().state) is not EngineState.READY:
        assert state in (EngineState.REFITTING, EngineState.RESTORING)


# --- the dry run ------------------------------------------------------------------------------------------------------


def test_validation_says_what_a_commit_would_do_and_does_nothing(
    daemon: Daemon, writer: RawClient, opened: tuple[int, int]
) -> None:
    epoch, source = opened
    with unharmed(daemon):
        version = daemon.status().version
        validated = writer.ask(ValidateRefit(epoch=epoch, source=source, check_finite=True), RefitValidated)
        assert (validated.version, validated.path) == (version + 1, "plan")
        assert validated.restorable_version == version


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"epoch": 1}, ErrorCode.STALE_EPOCH),
        ({"source": 10**6}, ErrorCode.UNKNOWN_SOURCE),
        ({"version": 0}, ErrorCode.VERSION_NOT_INCREASING),
        ({"only": ["no.such.tensor"]}, ErrorCode.MANIFEST_MISMATCH),
        ({"deadline_seconds": 0.0}, ErrorCode.DEADLINE_EXCEEDED),
    ],
)
def test_validation_refuses_what_a_commit_refuses(
    daemon: Daemon, writer: RawClient, opened: tuple[int, int], change: dict[str, object], code: ErrorCode
) -> None:
    """The same arguments, the same code; nothing has happened."""
    arguments = {"epoch": opened[0], "source": opened[1], **change}
    with unharmed(daemon):
        assert writer.refused(ValidateRefit(**arguments)).code is code  # type: ignore[arg-type]
        assert writer.refused(CommitRefit(**arguments)).code is code  # type: ignore[arg-type]


def test_validation_reads_every_value_where_asked_to(
    daemon: Daemon, writer: RawClient, model: PreTrainedModel, opened: tuple[int, int]
) -> None:
    """One NaN is found before anything is written."""
    epoch, source = opened
    with torch.no_grad():
        model.lm_head.weight[3, 5] = float("nan")
    with unharmed(daemon):
        refused = writer.refused(ValidateRefit(epoch=epoch, source=source, check_finite=True))
        assert refused.code is ErrorCode.NOT_FINITE
        writer.ask(ValidateRefit(epoch=epoch, source=source), RefitValidated)


def test_buckets_are_validated_by_what_is_announced(daemon: Daemon, writer: RawClient, opened: tuple[int, int]) -> None:
    epoch, _ = opened
    memory = backend_for("cpu").buckets(2, 1 << 16, torch.device("cpu"))
    source = writer.ask(OpenSource(epoch=epoch, kind="bucket", segments=memory.segments), SourceOpened).source
    norm = TensorShape(name="model.norm.weight", dtype=DType.BFLOAT16, shape=(128,))
    wrong = TensorShape(name="model.norm.weight", dtype=DType.BFLOAT16, shape=(127,))
    with unharmed(daemon):
        writer.ask(ValidateRefit(epoch=epoch, source=source, tensors=[norm], partial=True), RefitValidated)
        for refused in (
            ValidateRefit(epoch=epoch, source=source, tensors=[norm]),
            ValidateRefit(epoch=epoch, source=source, tensors=[wrong], partial=True),
        ):
            assert writer.refused(refused).code is ErrorCode.MANIFEST_MISMATCH
        assert (
            writer.refused(ValidateRefit(epoch=epoch, source=source, tensors=[norm, norm], partial=True)).code
            is ErrorCode.INVALID_DESCRIPTOR
        )
    memory.close()


# --- held -------------------------------------------------------------------------------------------------------------


def test_held_commit_is_published_by_finish(
    daemon: Daemon, writer: RawClient, model: PreTrainedModel, opened: tuple[int, int]
) -> None:
    """Until then the old version is the one served, and requests wait; afterwards the weights are exactly B."""
    epoch, source = opened
    before = daemon.status().version
    held = writer.ask(CommitRefit(epoch=epoch, source=source, hold=True), RefitHeld)
    status = daemon.status()
    assert (status.state, status.open_refit, status.version) == (EngineState.REFITTING, "held", before)
    report = writer.ask(FinishRefit(epoch=epoch, refit=held.refit), RefitCommitted).report
    assert (report.version, report.digest) == (before + 1, held.digest)
    assert held.version == report.version
    assert daemon.verify(model, full=True)
    assert sing(daemon)[1] == report.version


def test_aborted_hold_brings_the_weights_back(daemon: Daemon, writer: RawClient, opened: tuple[int, int]) -> None:
    """Every byte had been written; weights A are served again under their own version, which never changed."""
    epoch, source = opened
    with unharmed(daemon):
        held = writer.ask(CommitRefit(epoch=epoch, source=source, hold=True), RefitHeld)
        aborted = writer.ask(AbortRefit(epoch=epoch, refit=held.refit), RefitAborted)
        assert aborted.state is EngineState.READY
        assert writer.refused(FinishRefit(epoch=epoch, refit=held.refit)).code is ErrorCode.UNKNOWN_REFIT


def test_hold_that_nobody_ends_is_aborted_at_its_deadline(
    daemon: Daemon, writer: RawClient, opened: tuple[int, int]
) -> None:
    """The kept weights come back by themselves."""
    epoch, source = opened
    with unharmed(daemon):
        writer.ask(CommitRefit(epoch=epoch, source=source, hold=True, deadline_seconds=2.0), RefitHeld)
        wait_until_restored(daemon)


def test_hold_of_a_session_that_ends_is_aborted(
    daemon: Daemon, daemon_process: DaemonProcess, opened: tuple[int, int], model: PreTrainedModel
) -> None:
    """What it held is never published."""
    assert opened, "weights B are in the shared model"
    shared = shared_module(model)
    assert shared is not None
    with unharmed(daemon):
        with raw_client(daemon_process.endpoint) as other:
            other.hello(pid=os.getpid())
            epoch = other.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
            command = OpenSource(epoch=epoch, kind="inplace", segments=shared.memory.segments, tensors=shared.tensors)
            source = other.ask(command, SourceOpened).source
            other.ask(CommitRefit(epoch=epoch, source=source, hold=True), RefitHeld)
        wait_until_restored(daemon)


@pytest.mark.parametrize("publish", [True, False])
def test_bucket_refit_is_held_and_then_ended(
    daemon: Daemon, writer: RawClient, model: PreTrainedModel, opened: tuple[int, int], publish: bool
) -> None:
    """`FinishRefit` twice publishes, once and an abort does not; no bucket is taken in between."""
    epoch, _ = opened
    tensors = checkpoint_tensors(model)
    layout = layout_of(tensors.items())
    memory = backend_for("cpu").buckets(2, 4 << 20, torch.device("cpu"))
    source = writer.ask(OpenSource(epoch=epoch, kind="bucket", segments=memory.segments), SourceOpened).source
    before = sing(daemon)
    began = writer.ask(BeginRefit(epoch=epoch, source=source, tensors=[*layout.values()]), RefitBegan)
    for filled in pack(tensors.items(), layout, memory.views, 1000):
        apply = ApplyBucket(epoch=epoch, refit=began.refit, bucket=filled.bucket, pieces=filled.pieces)
        writer.ask(apply, BucketApplied)
    held = writer.ask(FinishRefit(epoch=epoch, refit=began.refit, hold=True), RefitHeld)
    assert writer.refused(apply).code is ErrorCode.NOT_ALLOWED_NOW
    if publish:
        report = writer.ask(FinishRefit(epoch=epoch, refit=held.refit), RefitCommitted).report
        assert report.version == held.version
        assert daemon.verify(model, full=True)
    else:
        writer.ask(AbortRefit(epoch=epoch, refit=held.refit), RefitAborted)
        assert sing(daemon) == before
    memory.close()
