"""One request and its sampled sequences: what the engine made, and how much of it the client has."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    FinishReason,
    Generate,
    GenerationFinished,
    GenerationStarted,
    ResolvedSampling,
    TokenDelta,
    VersionRun,
)
from refitd.prompts import Prompts
from refitd.sessions import Session

if TYPE_CHECKING:
    from refitd.engine import Adapter, Detokenizer, PreparedRequest, StepLogprobs, StepOutput

# vLLM's reasons by ours; `str()` of its enum is the name.
FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "error",
    "error": "error",
    "repetition": "stop",
}
# Of an id with its log-probability, and of where a token's text ends.
TOKEN_BYTES = 8
TEXT_END_BYTES = 8
# At most, in a Python string.
CHARACTER_BYTES = 4


class Output:
    """One sampled sequence, from submission until its request is acknowledged.

    Arrays are by token; `top_ids` and `top_logprobs` hold `top` alternatives per token, `text_ends` the length of the
    text so far. `sent` is the client's cursor.
    """

    def __init__(self, job: Job, prompt: int, index: int, seed: int | None) -> None:
        self.job = job
        self.prompt = prompt
        self.index = index
        self.seed = seed
        self.key = ""
        self.detokenizer: Detokenizer | None = None
        self.token_ids = array("i")
        self.logprobs = array("f")
        self.top = job.body.sampling.logprobs
        self.top_ids = array("i")
        self.top_logprobs = array("f")
        self.versions: list[list[int]] = []
        self.text = ""
        self.text_ends = array("q")
        self.text_sent = 0
        self.sent = 0
        self.told_end = False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: ErrorCode | None = None
        self.cached_tokens: int | None = None
        self.prompt_top_ids = array("i")
        self.prompt_top_logprobs = array("f")
        self.routed_experts: list[Any] = []

    def take(self, step: StepOutput, version: int) -> int:
        """Stores a step's tokens; returns how many. The output may be finished by it."""
        if self.cached_tokens is None and step.prefill_stats is not None:
            self.cached_tokens = int(step.prefill_stats.num_cached_tokens)
        if step.new_prompt_logprobs_tensors is not None:
            self._take_prompt_logprobs(step.new_prompt_logprobs_tensors)
        count = len(step.new_token_ids)
        if count:
            self._take_tokens(step, count, version)
        if step.routed_experts is not None and self.job.body.routed_experts:
            self.routed_experts.append(step.routed_experts)
            self.job.size_bytes += step.routed_experts.nbytes
        if self.finish_reason is None and step.finish_reason is not None:
            self._take_end(FINISH_REASONS[str(step.finish_reason)], step.stop_reason)
        return count

    def _take_tokens(self, step: StepOutput, count: int, version: int) -> None:
        if not self.token_ids:
            self.job.first_token()
        self.token_ids.extend(step.new_token_ids)
        self.job.size_bytes += count * TOKEN_BYTES * (1 + self.top)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][1] += count
        else:
            self.versions.append([version, count])
        if step.new_logprobs is not None:
            self._take_logprobs(step.new_logprobs, count)
        if self.detokenizer is not None:
            self._take_text(self.detokenizer, step)

    def _take_logprobs(self, rows: StepLogprobs, count: int) -> None:
        values = rows.logprobs[:count, 0].tolist()
        self.logprobs.extend(values)
        if self.top:
            self.top_ids.frombytes(rows.logprob_token_ids[:count, 1 : 1 + self.top].astype("int32").tobytes())
            self.top_logprobs.frombytes(rows.logprobs[:count, 1 : 1 + self.top].astype("float32").tobytes())
        if any(map(math.isnan, values)):
            self.finish("error", error=ErrorCode.NOT_A_NUMBER)

    def _take_prompt_logprobs(self, tensors: Any) -> None:
        """vLLM gives rows for prompt tokens 1..n-1, the token itself in column 0; token 0 has no logprob.

        A request that was preempted is read again, and its rows come again.
        """
        columns = tensors.logprobs.shape[1]
        if len(self.prompt_top_ids) >= columns * self.job.prompt_lengths[self.prompt]:
            return
        if not self.prompt_top_ids:
            self._take_first_prompt_row(columns)
        self.prompt_top_ids.frombytes(tensors.logprob_token_ids.numpy().astype("int32").tobytes())
        self.prompt_top_logprobs.frombytes(tensors.logprobs.numpy().astype("float32").tobytes())
        self.job.size_bytes += tensors.logprobs.numel() * TOKEN_BYTES

    def _take_first_prompt_row(self, columns: int) -> None:
        first = self.job.prompt_ids[self.prompt][0]
        self.prompt_top_ids.extend([first] * columns)
        self.prompt_top_logprobs.extend([math.nan] * columns)

    def _take_text(self, detokenizer: Detokenizer, step: StepOutput) -> None:
        ended = step.finish_reason is not None or self.finish_reason is not None
        stop_string = detokenizer.update(step.new_token_ids, str(step.finish_reason) == "stop")
        text = detokenizer.get_next_output_text(ended or stop_string is not None, delta=True)
        self.text += text
        self.text_ends.extend([len(self.text)] * len(step.new_token_ids))
        self.job.size_bytes += CHARACTER_BYTES * len(text) + TEXT_END_BYTES * len(step.new_token_ids)
        if stop_string is not None and self.finish_reason is None:
            self._cut(detokenizer.num_output_tokens())
            self.finish("stop", stop_reason=stop_string)

    def _cut(self, tokens: int) -> None:
        """Drops tokens behind the one that completed a stop string; they came in the same step, so none was sent."""
        surplus = len(self.token_ids) - tokens
        if surplus > 0:
            del self.token_ids[tokens:], self.logprobs[tokens:], self.text_ends[tokens:]
            del self.top_ids[tokens * self.top :], self.top_logprobs[tokens * self.top :]
            self.versions[-1][1] -= surplus

    def _take_end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """vLLM does not name the model's first EOS id as the reason of a stop: the last token says it."""
        if reason == "stop" and stop_reason is None and self.token_ids:
            stop_reason = self.token_ids[-1]
        self.finish(reason, stop_reason=stop_reason, error=ErrorCode.ENGINE_ERROR if reason == "error" else None)

    def cancel(self, error: ErrorCode | None) -> None:
        """Ends here; text that was held back as the possible beginning of a stop string is none."""
        if self.detokenizer is not None:
            self.text += self.detokenizer.get_next_output_text(True, delta=True)
        self.finish("cancelled", error=error)

    def finish(
        self, reason: FinishReason, *, stop_reason: int | str | None = None, error: ErrorCode | None = None
    ) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.error = error

    def rewind(self, position: int) -> None:
        """The client has only the first `position` tokens."""
        self.sent = max(0, min(position, len(self.token_ids)))
        self.text_sent = self.text_ends[self.sent - 1] if self.sent and self.text_ends else 0
        self.told_end = False

    @property
    def has_news(self) -> bool:
        return self.sent < len(self.token_ids) or (self.finish_reason is not None and not self.told_end)

    def delta(self) -> TokenDelta:
        """All that the client does not have yet; moves the cursor."""
        first, count = self.sent, len(self.token_ids) - self.sent
        ended = self.finish_reason is not None
        prompt_top = self.job.body.sampling.prompt_logprobs if first == 0 else None
        text = self.text[self.text_sent :] if self.job.body.sampling.text else None
        self.sent, self.text_sent, self.told_end = len(self.token_ids), len(self.text), ended
        return TokenDelta(
            request=self.job.request,
            prompt=self.prompt,
            output=self.index,
            position=first,
            count=count,
            versions=version_runs(self.versions, first),
            text=text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            cached_tokens=self.cached_tokens if first == 0 else None,
            top=self.top,
            prompt_top=prompt_top,
            prompt_rows=0 if prompt_top is None else len(self.prompt_top_ids) // (1 + prompt_top),
            routed_experts=self._experts_shape() if ended and self.routed_experts else None,
        )

    def _experts_shape(self) -> list[int]:
        """Tokens (the prompt's first), layers, experts of each."""
        return [sum(map(len, self.routed_experts)), *self.routed_experts[0].shape[1:]]


class Job:
    """One `Generate`: its outputs, until the client has acknowledged them.

    What only the engine needs goes when the last of them is complete; `size_bytes` is what stays, and grows with them.
    """

    def __init__(
        self,
        session: Session,
        request: int,
        body: Generate,
        prompts: Prompts,
        resolved: ResolvedSampling,
        adapter: Adapter | None = None,
    ) -> None:
        self.session = session
        self.request = request
        # The prompts are in `prompt_ids` now.
        self.body = replace(body, texts=None)
        self.stream = body.stream
        self.announced = False
        # Its client has a new connection, and has not said yet how far it has come.
        self.paused = False
        self.prompt_ids = prompts.ids
        self.prompt_lengths = prompts.lengths
        self.resolved = resolved
        self.adapter = adapter
        self.size_bytes = 0
        self.prepared: dict[int, PreparedRequest] = {}
        self.done = asyncio.Event()
        self._received = time.monotonic()
        self._submitted: float | None = None
        self._first_token: float | None = None
        self._ended: float | None = None
        n = body.sampling.n
        self.outputs = [
            Output(self, prompt, index, _seed(body.sampling.seed, index))
            for prompt in range(len(prompts.ids))
            for index in range(n)
        ]
        self.unfinished = len(self.outputs)

    @property
    def queued_seconds(self) -> float:
        """Until all its sequences were with the engine."""
        return self.total_seconds if self._submitted is None else self._submitted - self._received

    @property
    def first_token_seconds(self) -> float:
        return self.total_seconds if self._first_token is None else self._first_token - self._received

    @property
    def total_seconds(self) -> float:
        return (time.monotonic() if self._ended is None else self._ended) - self._received

    def remaining_seconds(self, deadline_seconds: float | None) -> float | None:
        if deadline_seconds is None:
            return None
        return max(0.0, self._received + deadline_seconds - time.monotonic())

    def submitted(self) -> None:
        self._submitted = time.monotonic()

    def first_token(self) -> None:
        if self._first_token is None:
            self._first_token = time.monotonic()

    def output_finished(self) -> None:
        self.unfinished -= 1
        if self.unfinished == 0:
            self.complete()

    def complete(self) -> None:
        """Nothing is handed to the engine any more."""
        self.ended()
        self.prompt_ids = []
        self.prepared.clear()
        for output in self.outputs:
            output.detokenizer = None
        self.done.set()

    def ended(self) -> None:
        if self._ended is None:
            self._ended = time.monotonic()

    def started(self) -> GenerationStarted:
        return GenerationStarted(resolved=self.resolved, prompt_lengths=self.prompt_lengths)

    def finished(self, deltas: list[TokenDelta]) -> GenerationFinished:
        return GenerationFinished(
            deltas=deltas,
            outputs=len(self.outputs),
            prompt_tokens=sum(self.prompt_lengths),
            generated_tokens=sum(len(output.token_ids) for output in self.outputs),
            resolved=self.resolved,
            first_token_milliseconds=self.first_token_seconds * 1e3,
            total_milliseconds=self.total_seconds * 1e3,
        )


def version_runs(versions: list[list[int]], first: int) -> list[VersionRun]:
    """The runs of an output's tokens from position `first` on."""
    runs = []
    for version, count in versions:
        skipped = min(first, count)
        first -= skipped
        if count > skipped:
            runs.append(VersionRun(version, count - skipped))
    return runs


def _seed(seed: int | None, index: int) -> int | None:
    return None if seed is None else seed + index
