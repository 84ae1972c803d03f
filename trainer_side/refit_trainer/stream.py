"""Generated tokens as numpy views: messages cut into deltas, deltas put together to samples. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from refit_protocol.codec import Frame
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import FinishReason, TokenDelta, VersionRun

# Ends of an output that is whole; any other one cut it off.
COMPLETE: frozenset[FinishReason] = frozenset({"stop", "length"})

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

_Scalar = TypeVar("_Scalar", np.int32, np.float32)

# The first of the two blobs of alternatives per token, of those per prompt token, and the blob of routed experts.
_TOP, _PROMPT, _EXPERTS = 2, 4, 6
_NO_INTS = np.empty(0, np.int32)
_NO_FLOATS = np.empty(0, np.float32)


class Alternatives(msgspec.Struct, frozen=True):
    """Likely tokens a position: `token_ids` (int32) and `logprobs` (float32), both of shape (positions, columns)."""

    token_ids: IntArray
    logprobs: FloatArray


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of output `output` of prompt `prompt`, beginning at `position`; the last one has a `finish_reason`.

    `token_ids` (int32) and `logprobs` (float32, of those tokens) have equal length and must not be written to.
    `versions` says which weights made how many of them. `top` has one row a token, `prompt_logprobs` one a prompt token
    with the token itself in column 0 (the first row is NaN), `routed_experts` the shape that the engine gave it.
    `clamped`, of the last delta: the context had less room than the `max_tokens` that were asked for.
    """

    prompt: int
    output: int
    position: int
    token_ids: IntArray
    logprobs: FloatArray
    versions: Sequence[VersionRun]
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ErrorCode | None = None
    clamped: bool = False
    cached_tokens: int | None = None
    top: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    routed_experts: IntArray | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One output that has ended: number `output` of the `n` for prompt number `prompt`; fields as in `Delta`.

    `finish_reason` is `stop` or `length` where it is `complete`. Otherwise it was cut off, and `error` says why: by a
    deadline, by policy `abort`, by NaN, or because the engine ended; None where the caller cancelled it.
    """

    prompt: int
    output: int
    token_ids: IntArray
    logprobs: FloatArray
    versions: Sequence[VersionRun]
    finish_reason: FinishReason
    text: str | None = None
    stop_reason: int | str | None = None
    error: ErrorCode | None = None
    clamped: bool = False
    cached_tokens: int | None = None
    top: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    routed_experts: IntArray | None = None

    @property
    def version(self) -> int | None:
        """The weights that made every token, None where several did (or there are no tokens)."""
        return self.versions[0].version if len(self.versions) == 1 else None

    @property
    def complete(self) -> bool:
        """Whether the model ended it, or `max_tokens` did; otherwise it is the beginning of an output."""
        return self.finish_reason in COMPLETE


def cut(deltas: Sequence[TokenDelta], blobs: Sequence[Frame]) -> list[Delta]:
    """The deltas of one message, in order; arrays are views of the blobs.

    Raises ValueError unless the blobs hold exactly what the deltas say.
    """
    token_ids, logprobs = _ints(blobs, 0), _floats(blobs, 1)
    extras = _Extras(blobs)
    result, begin = [], 0
    for described in deltas:
        end = begin + described.count
        delta = _plain(described, token_ids[begin:end], logprobs[begin:end])
        result.append(_with_extras(delta, described, extras) if _has_extras(described) else delta)
        begin = end
    if begin != len(token_ids) or begin != len(logprobs):
        raise ValueError(f"{len(token_ids)} ids and {len(logprobs)} logprobs came for {begin} tokens")
    return result


def without_first(delta: Delta, tokens: int, characters: int) -> Delta:
    """What comes behind so many tokens, and characters of the text; of the prompt all has been said with the first."""
    return msgspec.structs.replace(
        delta,
        position=delta.position + tokens,
        token_ids=delta.token_ids[tokens:],
        logprobs=delta.logprobs[tokens:],
        versions=_runs_behind(delta.versions, tokens),
        text=None if delta.text is None else delta.text[characters:],
        cached_tokens=None,
        top=None if delta.top is None else Alternatives(delta.top.token_ids[tokens:], delta.top.logprobs[tokens:]),
        prompt_logprobs=None,
    )


def _runs_behind(runs: Sequence[VersionRun], tokens: int) -> list[VersionRun]:
    behind = []
    for run in runs:
        skipped = min(tokens, run.count)
        tokens -= skipped
        if run.count > skipped:
            behind.append(VersionRun(run.version, run.count - skipped))
    return behind


def _plain(described: TokenDelta, token_ids: IntArray, logprobs: FloatArray) -> Delta:
    return Delta(
        prompt=described.prompt,
        output=described.output,
        position=described.position,
        token_ids=token_ids,
        logprobs=logprobs,
        versions=described.versions,
        text=described.text,
        finish_reason=described.finish_reason,
        stop_reason=described.stop_reason,
        error=described.error,
        cached_tokens=described.cached_tokens,
    )


def _has_extras(delta: TokenDelta) -> bool:
    return delta.top > 0 or delta.prompt_top is not None or delta.routed_experts is not None


def _with_extras(delta: Delta, described: TokenDelta, extras: _Extras) -> Delta:
    more: dict[str, Any] = {}
    if described.top > 0:
        more["top"] = extras.alternatives(_TOP, described.count, described.top)
    if described.prompt_top is not None:
        more["prompt_logprobs"] = extras.alternatives(_PROMPT, described.prompt_rows, 1 + described.prompt_top)
    if described.routed_experts is not None:
        experts = extras.ints(_EXPERTS, prod(described.routed_experts))
        more["routed_experts"] = experts.reshape(described.routed_experts)
    return msgspec.structs.replace(delta, **more)


class _Extras:
    """Reads the optional blobs of one message from front to back."""

    def __init__(self, blobs: Sequence[Frame]) -> None:
        self._blobs = blobs
        self._taken: Counter[int] = Counter()

    def alternatives(self, blob: int, rows: int, columns: int) -> Alternatives:
        shape = (rows, columns)
        token_ids = self.ints(blob, rows * columns).reshape(shape)
        return Alternatives(
            token_ids, self._take(_floats(self._blobs, blob + 1), blob + 1, rows * columns).reshape(shape)
        )

    def ints(self, blob: int, count: int) -> IntArray:
        return self._take(_ints(self._blobs, blob), blob, count)

    def _take(self, values: npt.NDArray[_Scalar], blob: int, count: int) -> npt.NDArray[_Scalar]:
        begin = self._taken[blob]
        self._taken[blob] = begin + count
        if begin + count > len(values):
            raise ValueError(f"blob {blob} holds {len(values)} values, not {begin + count}")
        return values[begin : begin + count]


def _ints(blobs: Sequence[Frame], blob: int) -> IntArray:
    return np.frombuffer(blobs[blob], "<i4") if blob < len(blobs) else _NO_INTS


def _floats(blobs: Sequence[Frame], blob: int) -> FloatArray:
    return np.frombuffer(blobs[blob], "<f4") if blob < len(blobs) else _NO_FLOATS


def is_cut_off(output: Delta | Sample) -> bool:
    """Whether something else than the model, the limits or the caller's own cancelling has ended it."""
    return output.finish_reason == "error" or (output.finish_reason == "cancelled" and output.error is not None)


class SampleAssembler:
    """Collects the deltas of one request until an output is finished."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], list[Delta]] = {}

    def add(self, delta: Delta) -> Sample | None:
        """The sample that `delta` completes, if it does."""
        key = (delta.prompt, delta.output)
        if delta.finish_reason is None:
            self._open.setdefault(key, []).append(delta)
            return None
        return _joined([*self._open.pop(key, []), delta], delta.finish_reason)


def _joined(deltas: list[Delta], finish_reason: FinishReason) -> Sample:
    last = deltas[-1]
    return Sample(
        prompt=last.prompt,
        output=last.output,
        token_ids=_concatenated([delta.token_ids for delta in deltas]),
        logprobs=_concatenated([delta.logprobs for delta in deltas]),
        versions=merged_runs(run for delta in deltas for run in delta.versions),
        finish_reason=finish_reason,
        text=_joined_text(deltas),
        stop_reason=last.stop_reason,
        error=last.error,
        clamped=last.clamped,
        cached_tokens=next((delta.cached_tokens for delta in deltas if delta.cached_tokens is not None), None),
        top=_joined_top(deltas),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        routed_experts=_joined_experts(deltas),
    )


def merged_runs(runs: Iterable[VersionRun]) -> list[VersionRun]:
    """Runs in order, neighbours of one version made one, empty ones left out."""
    merged: list[VersionRun] = []
    for run in runs:
        if merged and merged[-1].version == run.version:
            merged[-1] = VersionRun(run.version, merged[-1].count + run.count)
        elif run.count:
            merged.append(run)
    return merged


def _concatenated(parts: list[npt.NDArray[_Scalar]]) -> npt.NDArray[_Scalar]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _joined_text(deltas: list[Delta]) -> str | None:
    parts = [delta.text for delta in deltas if delta.text is not None]
    return "".join(parts) if parts else None


def _joined_top(deltas: list[Delta]) -> Alternatives | None:
    tops = [delta.top for delta in deltas if delta.top is not None]
    if not tops:
        return None
    return Alternatives(_concatenated([top.token_ids for top in tops]), _concatenated([top.logprobs for top in tops]))


def _joined_experts(deltas: list[Delta]) -> IntArray | None:
    parts = [delta.routed_experts for delta in deltas if delta.routed_experts is not None]
    return _concatenated(parts) if parts else None
