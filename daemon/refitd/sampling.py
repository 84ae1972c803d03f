"""Checks what a `Generate` asks of the sampler, and says what the engine will really use. Pure: no engine, no sockets.

What only vLLM can judge (a grammar that does not compile, say) it refuses itself, also before anything is submitted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import Generate, ResolvedSampling, Sampling, StructuredOutputs
from refitd.engine import EngineInfo
from refitd.prompts import Prompts

CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_CONSTRAINT_BYTES = 64 << 10
# Both a JSON schema's levels and a pattern's parentheses: compilers of grammars recurse.
MAX_CONSTRAINT_DEPTH = 32
MAX_STOP_STRINGS = 64
MAX_WORDS = 1024
OPENING, CLOSING = "([{", ")]}"

# Closed ranges of single numbers; what is not finite lies in none.
RANGES: dict[str, tuple[float, float]] = {
    "n": (1, math.inf),
    "min_tokens": (0, math.inf),
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "top_k": (-1, math.inf),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, math.inf),
    "seed": (0, 2**63 - 1),
    "max_tokens": (1, math.inf),
}
NOT_ZERO = frozenset({"top_p", "repetition_penalty"})


def resolve(body: Generate, prompts: Prompts, info: EngineInfo) -> ResolvedSampling:
    """What the engine will use. Raises `invalid_sampling`, or `unsupported` for what this engine cannot do at all."""
    _check_ranges(body.sampling)
    _check_ids(body.sampling, info.model.vocab_size)
    _check_logprobs(body.sampling, info.max_logprobs)
    _check_texts(body.sampling, info)
    _check_structured(body.sampling.structured)
    _check_abilities(body, info)
    _check_waiting(body)
    resolved = _resolved(body, prompts, info)
    _check_min_tokens(body.sampling, resolved)
    return resolved


def _resolved(body: Generate, prompts: Prompts, info: EngineInfo) -> ResolvedSampling:
    sampling = body.sampling
    asked = sampling.max_tokens
    room = [info.model.max_model_len - length for length in prompts.lengths]
    stop = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop.update(info.model.eos_token_ids)
    return ResolvedSampling(
        max_tokens=[left if asked is None else min(asked, left) for left in room],
        clamped=[asked is not None and asked > left for left in room],
        stop_token_ids=sorted(stop),
        logprobs_mode=info.logprobs_mode,
        lora=body.lora,
    )


def _check_ranges(sampling: Sampling) -> None:
    for field, (low, high) in RANGES.items():
        value = getattr(sampling, field)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise _invalid(f"{field} is {value}, not in [{low:g}, {high:g}]")
        if value == 0 and field in NOT_ZERO:
            raise _invalid(f"{field} is 0, it must be greater")


def _check_ids(sampling: Sampling, vocabulary: int) -> None:
    allowed = sampling.allowed_token_ids
    named = {
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "allowed_token_ids": allowed or [],
    }
    for field, ids in named.items():
        outside = [token for token in ids if not 0 <= token < vocabulary]
        if outside:
            raise _invalid(f"{field}: id {outside[0]} is not in [0, {vocabulary})")
        if repeated := _repeated(ids):
            raise _invalid(f"{field}: id {repeated[0]} comes twice")
    if allowed is not None and not allowed:
        raise _invalid("allowed_token_ids is empty: no token could be sampled")
    if unreal := [bias for _, bias in sampling.logit_bias if not math.isfinite(bias)]:
        raise _invalid(f"logit_bias: {unreal[0]} is not a finite number")


def _check_logprobs(sampling: Sampling, most: int) -> None:
    for field, columns in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if columns is not None and not 0 <= columns <= most:
            raise _invalid(f"{field} is {columns}, not in [0, {most}] (the daemon's engine.max_logprobs)")


def _check_texts(sampling: Sampling, info: EngineInfo) -> None:
    wants_text = sampling.stop or sampling.text or sampling.bad_words or sampling.structured
    if wants_text and not info.has_tokenizer:
        raise _invalid("stop strings, bad words, structured outputs and text need a tokenizer; this engine has none")
    for field, words, most in (("stop", sampling.stop, MAX_STOP_STRINGS), ("bad_words", sampling.bad_words, MAX_WORDS)):
        if not all(words):
            raise _invalid(f"{field} holds an empty string")
        if len(words) > most:
            raise _invalid(f"{field} holds {len(words)} strings, at most {most}")


def _check_structured(structured: StructuredOutputs | None) -> None:
    if structured is None:
        return
    chosen = [name for name in CONSTRAINTS if getattr(structured, name) not in (None, False)]
    if len(chosen) != 1:
        raise _invalid(f"structured names {len(chosen)} constraints, exactly one of {', '.join(CONSTRAINTS)} is wanted")
    constraint = getattr(structured, chosen[0])
    if not constraint:
        raise _invalid(f"structured.{chosen[0]} is empty")
    size_bytes = len(json.dumps(constraint))
    if size_bytes > MAX_CONSTRAINT_BYTES:
        raise _invalid(f"structured.{chosen[0]} has {size_bytes} bytes, at most {MAX_CONSTRAINT_BYTES}")
    if _depth(constraint) > MAX_CONSTRAINT_DEPTH:
        raise _invalid(f"structured.{chosen[0]} is nested more than {MAX_CONSTRAINT_DEPTH} deep")


def _check_abilities(body: Generate, info: EngineInfo) -> None:
    if body.routed_experts and not info.routed_experts:
        raise ProtocolError(
            ErrorCode.UNSUPPORTED,
            "this engine returns no routed experts: it wants a mixture-of-experts model and "
            "engine.extra.enable_return_routed_experts = true",
        )
    if body.priority and not info.priorities:
        raise ProtocolError(ErrorCode.UNSUPPORTED, 'priorities need engine.scheduling_policy = "priority"')
    if not -(2**31) <= body.priority < 2**31:
        raise _invalid(f"priority {body.priority} does not fit into 32 bits")


def _check_waiting(body: Generate) -> None:
    """`max_version_lag` is judged against `min_version`: the version the trainer holds."""
    if body.max_version_lag is not None and body.min_version is None:
        raise _invalid("max_version_lag needs min_version, the trainer's version")
    if body.max_version_lag is not None and body.max_version_lag < 0:
        raise _invalid(f"max_version_lag is {body.max_version_lag}, at least 0")
    seconds = body.deadline_seconds
    if seconds is not None and not math.isfinite(seconds):
        raise _invalid(f"deadline_seconds is {seconds}, it must be finite")
    if seconds is not None and seconds <= 0:
        raise ProtocolError(ErrorCode.DEADLINE_EXCEEDED, f"deadline_seconds is {seconds:g}: none is left")


def _check_min_tokens(sampling: Sampling, resolved: ResolvedSampling) -> None:
    for prompt, most in enumerate(resolved.max_tokens):
        if sampling.min_tokens > most:
            raise _invalid(f"min_tokens is {sampling.min_tokens}, prompt {prompt} leaves room for {most}")


def _depth(constraint: Any) -> int:
    """Of brackets in a text, whatever its language, or of the levels of a JSON value."""
    depth = deepest = 0
    for character in constraint if isinstance(constraint, str) else json.dumps(constraint):
        depth += (character in OPENING) - (character in CLOSING)
        deepest = max(deepest, depth)
    return deepest


def _repeated(ids: Iterable[int]) -> list[int]:
    return [token for token, times in Counter(ids).items() if times > 1]


def _invalid(message: str) -> ProtocolError:
    return ProtocolError(ErrorCode.INVALID_SAMPLING, message)
