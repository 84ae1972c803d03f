"""Prompts in, tokens out."""

from __future__ import annotations

from typing import Any

import msgspec

from refit_protocol.errors import ErrorCode
from refit_protocol.messages.kinds import Command, Detail, Fact, FinishReason, Record

__all__ = [
    "AcknowledgeGeneration",
    "CancelGeneration",
    "Generate",
    "GenerationCancelled",
    "GenerationFinished",
    "GenerationForgotten",
    "GenerationResumed",
    "GenerationStarted",
    "ResolvedSampling",
    "ResumeGeneration",
    "Sampling",
    "StreamCursor",
    "StructuredOutputs",
    "TokenDelta",
    "TokensGenerated",
    "VersionRun",
]


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


Commands = Generate | CancelGeneration | ResumeGeneration | AcknowledgeGeneration
Facts = (
    GenerationStarted
    | TokensGenerated
    | GenerationFinished
    | GenerationCancelled
    | GenerationResumed
    | GenerationForgotten
)
