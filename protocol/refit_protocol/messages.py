"""Every message of protocol version 1 in the order of a session's life: commands from clients, facts from the daemon.

Bulk numbers travel in the blobs that follow the header (see each message); names of fields carry their units.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from refit_protocol.errors import ErrorCode, Fault, ProtocolError
from refit_protocol.rendezvous import GroupBackend
from refit_protocol.states import EngineState
from refit_protocol.tensors import BucketPiece, DType, Segment, SourceTensor, TensorShape

PROTOCOL_VERSION = 1

InflightPolicy = Literal["finish", "keep", "recompute", "abort"]
AttestMode = Literal["off", "sampled", "full"]
PlanMode = Literal["auto", "off", "require"]
RefitPath = Literal["plan", "loader", "mixed"]

FinishReason = Literal["stop", "length", "cancelled", "error"]
SleepTag = Literal["weights", "kv_cache"]


class Command(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag=True,
    tag_field="type",
):
    """From client to daemon. Unknown fields are refused: a misspelt option must not be ignored."""


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, tag_field="type"):
    """From daemon to client. Unknown fields are ignored: the daemon may say more within version 1."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a command."""


class Detail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a fact."""


# --- sessions ---------------------------------------------------------------------------------------------------------


class Hello(Command, frozen=True, kw_only=True):
    """Opens a session, or takes up the one named by `resume` after a reconnect.

    `pid` is given by clients on the same machine: the daemon then notices their death at once.
    """

    protocol_versions: list[int]
    client: str
    pid: int | None = None
    lease_seconds: float | None = None
    resume: str | None = None


class ModelInfo(Detail, frozen=True, kw_only=True):
    name: str
    vocab_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: list[int]


class LimitInfo(Detail, frozen=True, kw_only=True):
    message_bytes: int
    requests_per_session: int
    prompts_per_request: int
    bucket_pieces: int
    buffered_bytes: int


class Welcome(Fact, frozen=True, kw_only=True):
    """`session` goes into the header of every later request; `epoch` changes with each start of the daemon."""

    protocol_version: int
    daemon_version: str
    session: str
    resumed: bool
    epoch: int
    lease_seconds: float
    heartbeat_seconds: float
    limits: LimitInfo
    model: ModelInfo | None


class Heartbeat(Command, frozen=True, kw_only=True):
    """Renews the lease of the session; so does every other request."""


class HeartbeatAcknowledged(Fact, frozen=True, kw_only=True):
    lease_seconds: float


class Goodbye(Command, frozen=True, kw_only=True):
    """Ends the session: its streams are cancelled, its memory unmapped, its writer role given up."""


class SessionClosed(Fact, frozen=True, kw_only=True):
    pass


class AcquireWriter(Command, frozen=True, kw_only=True):
    """Asks to be the one session that writes weights; `takeover` fences off the present writer."""

    takeover: bool = False


class WriterAcquired(Fact, frozen=True, kw_only=True):
    """`epoch` goes into every refit command; frames with an older one are refused."""

    epoch: int


class ReleaseWriter(Command, frozen=True, kw_only=True):
    pass


class WriterReleased(Fact, frozen=True, kw_only=True):
    pass


# --- looking ----------------------------------------------------------------------------------------------------------


class GetStatus(Command, frozen=True, kw_only=True):
    """Needs no session."""


class LastError(Detail, frozen=True, kw_only=True):
    code: ErrorCode
    message: str
    unix_seconds: float


LoadPhase = Literal["starting the engine", "loading weights", "warming up"]


class Status(Fact, frozen=True, kw_only=True):
    """What is true now. `digest` is of the weights that are served, as 16 hex digits, None while they are torn."""

    daemon_version: str
    pid: int
    epoch: int
    state: EngineState
    model: ModelInfo | None
    version: int
    digest: str | None
    digest_mode: AttestMode
    sleep_level: int
    asleep_tags: list[SleepTag]
    progress: float
    sessions: int
    writer: str | None
    running_requests: int
    waiting_requests: int
    restorable_version: int | None
    last_refit: RefitReport | None
    last_error: LastError | None
    uptime_seconds: float
    logprobs_mode: str
    generated_tokens: int = 0
    http_url: str | None = None
    vllm_version: str | None = None
    devices: list[str] = []
    adapters: list[str] = []
    load_phase: LoadPhase | None = None


class GetManifest(Command, frozen=True, kw_only=True):
    pass


class ManifestTensor(Detail, frozen=True, kw_only=True):
    """A tensor that a full refit must bring, unless `optional`; `alias_of` names the tensor it is tied to."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    optional: bool = False
    alias_of: str | None = None


class Manifest(Fact, frozen=True, kw_only=True):
    tensors: list[ManifestTensor]


class GetDigest(Command, frozen=True, kw_only=True):
    """Reads the engine's memory and answers what is served: see `refit_protocol.digest` for the definition."""

    mode: Literal["sampled", "full"] = "sampled"


class WeightsDigest(Fact, frozen=True, kw_only=True):
    version: int
    mode: Literal["sampled", "full"]
    digest: str


class GetLoggerMetrics(Command, frozen=True, kw_only=True):
    """Asks for the engine's figures, sampled at a fixed interval since they were last cleared."""

    clear: bool = False


class LoggerMetrics(Fact, frozen=True, kw_only=True):
    """One list an engine figure, all of one length; `interval_seconds` lies between two samples."""

    interval_seconds: float
    samples: dict[str, list[float]]


# --- refit ------------------------------------------------------------------------------------------------------------


class GroupMember(Record, frozen=True, kw_only=True):
    """One rank of a trainer whose ranks make up one source; `group` is a secret of theirs, new for every source."""

    group: str
    rank: int
    world_size: int


class OpenSource(Command, frozen=True, kw_only=True):
    """Exports trainer memory once.

    `inplace`: `tensors` are the parameters themselves. `bucket`: the segments are staging buckets, `tensors` is empty.
    With `member` it is what one rank holds, and answered when all ranks, each in a session of its own, have sent
    theirs; one of them has to be the writer, and all give its epoch. `deadline_seconds` bounds the wait for the others.
    """

    epoch: int
    kind: Literal["inplace", "bucket"]
    segments: list[Segment]
    tensors: list[SourceTensor] = []
    plan: PlanMode | None = None
    member: GroupMember | None = None
    deadline_seconds: float | None = None


class UnplannedTensor(Detail, frozen=True, kw_only=True):
    name: str
    why: str


class SourceOpened(Fact, frozen=True, kw_only=True):
    source: int
    path: RefitPath
    tensors: int
    size_bytes: int
    unplanned: list[UnplannedTensor]


class CloseSource(Command, frozen=True, kw_only=True):
    epoch: int
    source: int


class SourceClosed(Fact, frozen=True, kw_only=True):
    source: int


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


class JoinCollective(Command, frozen=True, kw_only=True):
    """Makes the engine's workers join the group that a trainer hosts at `address` and `port`, as a source of refits.

    Worker i becomes rank `first_rank + i` of `world_size`; rank 0, the host, broadcasts.
    """

    epoch: int
    address: str
    port: int
    world_size: int
    first_rank: int = 1
    timeout_seconds: float = 60.0
    plan: PlanMode | None = None


class CollectiveJoined(Fact, frozen=True, kw_only=True):
    """All ranks are there, and a first broadcast has come through. `bucket_bytes` and `backend` are the host's."""

    source: int
    ranks: list[int]
    backend: GroupBackend
    bucket_bytes: int


class CommitRefit(Command, frozen=True, kw_only=True):
    """Refits from an in-place source. `only` names a partial update; `version` defaults to the served one plus one.

    Where ranks opened the source together, each sends the same commit, and it is done when all have.
    With `hold` everything is done except to publish: see `RefitHeld`.
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
    """Bucket number `bucket` of the source holds `pieces`; it may be overwritten once `BucketApplied` has come."""

    epoch: int
    refit: int
    bucket: int
    pieces: list[BucketPiece]


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
    """Commits a bucket refit, or publishes one that is held. With `hold` a bucket refit becomes held instead."""

    epoch: int
    refit: int
    hold: bool = False


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
    validate: float
    gate: float
    copy: float
    attest: float
    publish: float
    total: float


class RefitReport(Detail, frozen=True, kw_only=True):
    version: int
    path: RefitPath
    tensors: int
    size_bytes: int
    partial: bool
    policy: InflightPolicy
    unplanned: list[UnplannedTensor]
    digest: str | None
    milliseconds: RefitMilliseconds


class RefitCommitted(Fact, frozen=True, kw_only=True):
    """All workers hold the new bytes and the version is published; trainer memory may be overwritten."""

    report: RefitReport


# --- generation -------------------------------------------------------------------------------------------------------


class StructuredOutputs(Record, frozen=True, kw_only=True):
    """Exactly one constraint on the sampled text: a JSON schema (as text or as it is), any JSON object, a regular
    expression, one of several texts, an EBNF grammar, or vLLM's structural tags. Needs the engine's tokenizer.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None


class Sampling(Record, frozen=True, kw_only=True):
    """What vLLM samples with; None leaves the engine's default. `max_tokens` None means: up to the context's end.

    `text` asks for decoded text beside the ids; stop strings need the engine's tokenizer. `logprobs` counts the top
    alternatives beside the sampled token, whose own logprob always comes.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: list[str] = []
    logit_bias: list[tuple[int, float]] = []
    allowed_token_ids: list[int] | None = None
    logprobs: int = 0
    prompt_logprobs: int | None = None
    structured: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    text: bool = False


class Generate(Command, frozen=True, kw_only=True):
    """Samples `sampling.n` continuations of each prompt.

    Prompts are token ids: blob 0 holds them all, little-endian int32, `prompt_lengths[i]` for prompt i. Alternatively
    `texts` holds the prompts as text, and no blob comes.
    With `stream`, `TokensGenerated` messages come as the engine makes tokens; without, one `GenerationFinished` holds
    all.
    """

    prompt_lengths: list[int] = []
    texts: list[str] | None = None
    sampling: Sampling = Sampling()
    stream: bool = True
    priority: int = 0
    lora: str | None = None
    routed_experts: bool = False
    min_version: int | None = None
    max_version_lag: int | None = None
    deadline_seconds: float | None = None


class ResolvedSampling(Detail, frozen=True, kw_only=True):
    """What the engine really uses: `max_tokens` per prompt, the whole stop set, the meaning of logprobs, the LoRA."""

    max_tokens: list[int]
    clamped: list[bool]
    stop_token_ids: list[int]
    logprobs_mode: str
    lora: str | None = None


class GenerationStarted(Fact, frozen=True, kw_only=True):
    resolved: ResolvedSampling
    prompt_lengths: list[int]


class VersionRun(msgspec.Struct, frozen=True, array_like=True):
    """`count` consecutive tokens made by weights `version`."""

    version: int
    count: int


class TokenDelta(Detail, frozen=True, kw_only=True):
    """`count` new tokens of one output, beginning at `position`; `request` is the id that the client gave.

    The end of an output is its `finish_reason`. `top` columns of alternatives follow per token, `prompt_top` per prompt
    token.
    """

    request: int
    prompt: int
    output: int
    position: int
    count: int
    versions: list[VersionRun]
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ErrorCode | None = None
    cached_tokens: int | None = None
    top: int = 0
    prompt_top: int | None = None
    prompt_rows: int = 0
    routed_experts: list[int] | None = None


class TokensGenerated(Fact, frozen=True, kw_only=True):
    """New tokens of any of the client's streams, one message per engine step.

    Blob 0: token ids, int32, all deltas after another. Blob 1: the sampled tokens' logprobs, float32, alike. Where any
    delta has `top > 0`: blobs 2 and 3 hold the alternatives' ids (int32) and logprobs (float32), `count x top` a delta.
    Where any delta has `prompt_top`: blobs 4 and 5 hold `prompt_rows` rows of 1 + prompt_top ids and logprobs, one per
    prompt token, the token itself first; the first token has no logprob, its row is NaN.
    Where any delta has `routed_experts` (its shape), blob 6 holds them as int32.
    Blobs that are not needed are empty. The header's id is 0: each delta names its own request.
    """

    deltas: list[TokenDelta]


class GenerationFinished(Fact, frozen=True, kw_only=True):
    """The last reply of a `Generate`: of a unary one with all tokens, of a stream with those not sent before.

    Blobs as in `TokensGenerated`.
    """

    deltas: list[TokenDelta]
    outputs: int
    prompt_tokens: int
    generated_tokens: int
    resolved: ResolvedSampling
    first_token_milliseconds: float
    total_milliseconds: float


class CancelGeneration(Command, frozen=True, kw_only=True):
    """Cancels one request of this session, or with None all of them; their streams end with `cancelled`."""

    request: int | None = None


class GenerationCancelled(Fact, frozen=True, kw_only=True):
    requests: list[int]


class StreamCursor(Record, frozen=True, kw_only=True):
    """All tokens before `position` of this output have arrived."""

    prompt: int
    output: int
    position: int


class ResumeGeneration(Command, frozen=True, kw_only=True):
    """After a reconnect: sends again what came after the cursors; outputs without a cursor start at 0."""

    request: int
    cursors: list[StreamCursor] = []


class GenerationResumed(Fact, frozen=True, kw_only=True):
    request: int
    finished: bool


class AcknowledgeGeneration(Command, frozen=True, kw_only=True):
    """The client has everything of these requests; the daemon may forget them."""

    requests: list[int]


class GenerationForgotten(Fact, frozen=True, kw_only=True):
    requests: list[int]


# --- the engine's life ------------------------------------------------------------------------------------------------


class LoadModel(Command, frozen=True, kw_only=True):
    """Starts the load that `defer_load` put off; the reply comes when the model can be served."""


class ModelLoaded(Fact, frozen=True, kw_only=True):
    model: ModelInfo
    load_seconds: float


class LoadAdapter(Command, frozen=True, kw_only=True):
    """Makes a LoRA adapter known as `name`, instead of one that has the name; `path` is on the daemon's machine."""

    name: str
    path: str


class AdapterLoaded(Fact, frozen=True, kw_only=True):
    name: str


class UnloadAdapter(Command, frozen=True, kw_only=True):
    """No new request may name it; those under way go on with it."""

    name: str


class AdapterUnloaded(Fact, frozen=True, kw_only=True):
    name: str


class ResetPrefixCache(Command, frozen=True, kw_only=True):
    pass


class PrefixCacheReset(Fact, frozen=True, kw_only=True):
    pass


class Sleep(Command, frozen=True, kw_only=True):
    """Level 1 frees the KV cache and moves weights to host memory; level 2 drops them: then only a full refit helps."""

    level: Literal[1, 2] = 1
    policy: InflightPolicy = "finish"


class WakeUp(Command, frozen=True, kw_only=True):
    """`tags` None wakes everything."""

    tags: list[SleepTag] | None = None


class SleepStateChanged(Fact, frozen=True, kw_only=True):
    level: int
    asleep_tags: list[SleepTag]
    servable: bool


class Failed(Fact, frozen=True, kw_only=True):
    """The request could not be served: whose fault, what to do, and whether the same request may work later."""

    code: ErrorCode
    fault: Fault
    message: str
    retryable: bool
    details: dict[str, Any] = {}

    @classmethod
    def from_error(cls, error: ProtocolError) -> Failed:
        return cls(
            code=error.code,
            fault=error.fault,
            message=error.message,
            retryable=error.retryable,
            details=dict(error.details),
        )


Request = (
    Hello
    | Heartbeat
    | Goodbye
    | AcquireWriter
    | ReleaseWriter
    | GetStatus
    | GetManifest
    | GetDigest
    | GetLoggerMetrics
    | OpenSource
    | CloseSource
    | ValidateRefit
    | JoinCollective
    | CommitRefit
    | BeginRefit
    | ApplyBucket
    | ReceiveBroadcast
    | FinishRefit
    | AbortRefit
    | RestoreWeights
    | ReloadWeights
    | Generate
    | CancelGeneration
    | ResumeGeneration
    | AcknowledgeGeneration
    | LoadModel
    | LoadAdapter
    | UnloadAdapter
    | ResetPrefixCache
    | Sleep
    | WakeUp
)

Reply = (
    Welcome
    | HeartbeatAcknowledged
    | SessionClosed
    | WriterAcquired
    | WriterReleased
    | Status
    | Manifest
    | WeightsDigest
    | LoggerMetrics
    | SourceOpened
    | SourceClosed
    | RefitValidated
    | RefitHeld
    | CollectiveJoined
    | RefitCommitted
    | RefitBegan
    | BucketApplied
    | BroadcastReceived
    | RefitAborted
    | WeightsRestored
    | GenerationStarted
    | TokensGenerated
    | GenerationFinished
    | GenerationCancelled
    | GenerationResumed
    | GenerationForgotten
    | ModelLoaded
    | AdapterLoaded
    | AdapterUnloaded
    | PrefixCacheReset
    | SleepStateChanged
    | Failed
)


class RequestHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`id` is chosen by the client, rises within a session, and is never 0."""

    id: int
    body: Request
    session: str | None = None


class ReplyHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`id` names the request (0: see `TokensGenerated`); `last` ends its replies."""

    id: int
    body: Reply
    last: bool = True
