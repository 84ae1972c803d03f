"""What a peer answers to a refit that goes well."""

from __future__ import annotations

import torch

from refit_protocol.messages import (
    AcquireWriter,
    ApplyBucket,
    BeginRefit,
    BucketApplied,
    FinishRefit,
    OpenSource,
    RefitBegan,
    RefitCommitted,
    RefitMilliseconds,
    RefitReport,
    SourceOpened,
    WriterAcquired,
)
from refit_trainer.layouts import layout_of
from tests.trainer.peer import Asked, Peer

TENSORS = {name: torch.full((16,), float(index)) for index, name in enumerate("abcdef")}
SPECS = [*layout_of(TENSORS.items()).values()]
REPORT = RefitReport(
    version=4,
    path="plan",
    tensors=1,
    size_bytes=1,
    partial=False,
    policy="keep",
    unplanned=[],
    digest=None,
    milliseconds=RefitMilliseconds(validate=0, gate=0, copy=0, attest=0, publish=0, total=0),
)


def grant(peer: Peer, *, source: int = 1, epoch: int = 7) -> OpenSource:
    """Answers what comes before the first refit of a source."""
    peer.next(AcquireWriter).reply(WriterAcquired(epoch=epoch))
    return open_source(peer, source)


def open_source(peer: Peer, source: int) -> OpenSource:
    asked = peer.next(OpenSource)
    asked.reply(SourceOpened(source=source, path="plan", tensors=1, size_bytes=1, unplanned=[]))
    return asked.body


def begin(peer: Peer) -> BeginRefit:
    asked = peer.next(BeginRefit)
    asked.reply(RefitBegan(refit=5, version=4))
    return asked.body


def applied(asked: Asked) -> None:
    asked.reply(BucketApplied(refit=5, bucket=asked.body.bucket, size_bytes=1))


def finish_begun(peer: Peer, buckets: int) -> None:
    for asked in [peer.next(ApplyBucket) for _ in range(buckets)]:
        applied(asked)
    peer.next(FinishRefit).reply(RefitCommitted(report=REPORT))
