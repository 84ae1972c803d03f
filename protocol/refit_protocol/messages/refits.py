"""New weights, from a source or from disk: validated, written, held, published or undone."""

from __future__ import annotations

from refit_protocol.messages.kinds import AttestMode, Command, Detail, Fact, InflightPolicy, RefitPath
from refit_protocol.messages.sources import UnplannedTensor
from refit_protocol.states import EngineState
from refit_protocol.tensors import BucketPiece, TensorShape

__all__ = [
    "AbortRefit",
    "ApplyBucket",
    "BeginRefit",
    "BroadcastReceived",
    "BucketApplied",
    "CommitRefit",
    "FinishRefit",
    "PrepareRefit",
    "ReceiveBroadcast",
    "RefitAborted",
    "RefitBegan",
    "RefitCommitted",
    "RefitHeld",
    "RefitMilliseconds",
    "RefitPrepared",
    "RefitReport",
    "RefitSummary",
    "RefitValidated",
    "ReloadWeights",
    "RestoreWeights",
    "ValidateRefit",
    "WeightsRestored",
]


class ValidateRefit(Command, frozen=True, kw_only=True):
    """Asks whether a refit would be refused, without shutting the gate or writing anything.

    The fields are those of `CommitRefit` for an in-place source (`only`), of `BeginRefit` for buckets (`tensors`,
    `partial`).
    """

    epoch: int
    source: int
    version: int | None = None
    policy: InflightPolicy | None = None
    only: list[str] | None = None
    tensors: list[TensorShape] = []
    partial: bool = False
    attest: AttestMode | None = None
    check_finite: bool | None = None
    deadline_seconds: float | None = None


class RefitValidated(Fact, frozen=True, kw_only=True):
    """`version` is what a commit would publish, `restorable_version` what an abort after its writes would put back."""

    version: int
    path: RefitPath
    restorable_version: int | None
    milliseconds: float


class CommitRefit(Command, frozen=True, kw_only=True):
    """Refits from an in-place source. `only` names a partial update; `version` defaults to the served one plus one.

    Where ranks opened the source together, each sends the same commit, and it is done when all have.
    With `hold` everything is done except to publish: see `RefitHeld`. With `release` no worker reads the memory before
    that number is in the source's bell: see `refit_protocol.bell`.
    """

    epoch: int
    source: int
    version: int | None = None
    policy: InflightPolicy | None = None
    only: list[str] | None = None
    attest: AttestMode | None = None
    check_finite: bool | None = None
    deadline_seconds: float | None = None
    hold: bool = False
    release: int | None = None


class PrepareRefit(Command, frozen=True, kw_only=True):
    """All of a commit in place that comes before its first byte, ahead of time: `FinishRefit` does the rest.

    The fields are those of `CommitRefit`. Without an end within `hold_seconds` it is over, and nothing has changed.
    """

    epoch: int
    source: int
    version: int | None = None
    policy: InflightPolicy | None = None
    only: list[str] | None = None
    attest: AttestMode | None = None
    check_finite: bool | None = None
    deadline_seconds: float | None = None
    hold_seconds: float | None = None


class RefitPrepared(Fact, frozen=True, kw_only=True):
    """The gate is shut, the engine stands still, and nothing is written yet.

    `ring`: copies wait on the device for this number in the source's bell, each of the `workers` for its own word; None
    where none do.
    """

    refit: int
    version: int
    ring: int | None
    workers: int


class BeginRefit(Command, frozen=True, kw_only=True):
    """Announces a bucket or collective refit: everything is validated, the gate closes before the first byte is read.

    From a collective source the tensors come in the order announced. `again`: the same tensors as the last time from
    this source; `tensors` is then left out.
    """

    epoch: int
    source: int
    tensors: list[TensorShape] = []
    again: bool = False
    version: int | None = None
    policy: InflightPolicy | None = None
    partial: bool = False
    attest: AttestMode | None = None
    check_finite: bool | None = None
    deadline_seconds: float | None = None


class RefitBegan(Fact, frozen=True, kw_only=True):
    refit: int
    version: int


class ApplyBucket(Command, frozen=True, kw_only=True):
    """Bucket number `bucket` of the source holds `pieces`; it may be overwritten once `BucketApplied` has come.

    With `layout` the pieces can be referred to by that number from then on: it is then sent without them. Without
    `refit` it is for the one that the session's last `BeginRefit` begins, whose answer need not have come.
    """

    epoch: int
    refit: int | None
    bucket: int
    pieces: list[BucketPiece] = []
    layout: int | None = None


class BucketApplied(Fact, frozen=True, kw_only=True):
    refit: int
    bucket: int
    size_bytes: int


class ReceiveBroadcast(Command, frozen=True, kw_only=True):
    """The tensors that `BeginRefit` announced come as broadcasts, laid out as `refit_protocol.broadcast` says."""

    epoch: int
    refit: int


class BroadcastReceived(Fact, frozen=True, kw_only=True):
    """All workers hold all of it; the sender's memory may be overwritten."""

    refit: int
    size_bytes: int


class FinishRefit(Command, frozen=True, kw_only=True):
    """Commits a bucket refit or a prepared one, or publishes one that is held. With `hold` it becomes held instead.

    `done`: what each worker writes into its word of the source's bell once it holds all that came through buckets.
    """

    epoch: int
    refit: int
    hold: bool = False
    done: int | None = None


class RefitHeld(Fact, frozen=True, kw_only=True):
    """All workers hold the new bytes, attested, and the gate stays shut: `FinishRefit` publishes, `AbortRefit` does
    not.

    `digest` is of the new weights, None where attest is off.
    """

    refit: int
    version: int
    digest: str | None


class AbortRefit(Command, frozen=True, kw_only=True):
    epoch: int
    refit: int


class RefitAborted(Fact, frozen=True, kw_only=True):
    """`state` says whether anything had been written: `ready` (nothing, or restored) or `torn`."""

    refit: int
    state: EngineState
    version: int


class RestoreWeights(Command, frozen=True, kw_only=True):
    """Puts back the last committed weights that the daemon kept (`keep_last = "host"`), without the trainer."""

    epoch: int


class WeightsRestored(Fact, frozen=True, kw_only=True):
    version: int
    digest: str | None
    total_milliseconds: float


class ReloadWeights(Command, frozen=True, kw_only=True):
    """A refit from a checkpoint on the daemon's machine; `path` None is the directory the model was loaded from."""

    epoch: int
    path: str | None = None
    version: int | None = None
    policy: InflightPolicy | None = None
    attest: AttestMode | None = None
    check_finite: bool | None = None
    deadline_seconds: float | None = None


class RefitMilliseconds(Detail, frozen=True, kw_only=True):
    """`waited`, which is not in `total`: for the `FinishRefit` of a prepared refit."""

    validate: float
    gate: float
    copy: float
    attest: float
    publish: float
    total: float
    waited: float = 0.0


class RefitReport(Detail, frozen=True, kw_only=True):
    """`stood_by`: all but its copy had been done when its commit came."""

    version: int
    path: RefitPath
    tensors: int
    size_bytes: int
    partial: bool
    policy: InflightPolicy
    unplanned: list[UnplannedTensor]
    digest: str | None
    milliseconds: RefitMilliseconds
    stood_by: bool = False


class RefitSummary(Detail, frozen=True, kw_only=True):
    """What a list of refits says of each: a report may name thousands of tensors."""

    version: int
    path: RefitPath
    size_bytes: int
    milliseconds: RefitMilliseconds


class RefitCommitted(Fact, frozen=True, kw_only=True):
    """All workers hold the new bytes and the version is published; trainer memory may be overwritten."""

    report: RefitReport


Commands = (
    ValidateRefit
    | CommitRefit
    | PrepareRefit
    | BeginRefit
    | ApplyBucket
    | ReceiveBroadcast
    | FinishRefit
    | AbortRefit
    | RestoreWeights
    | ReloadWeights
)
Facts = (
    RefitValidated
    | RefitPrepared
    | RefitHeld
    | RefitCommitted
    | RefitBegan
    | BucketApplied
    | BroadcastReceived
    | RefitAborted
    | WeightsRestored
)
