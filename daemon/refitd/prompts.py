"""Reads and checks the prompts of a `Generate` before the engine sees them: an id outside the vocabulary would kill it.

Pure: no engine, no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refit_protocol.codec import Frame
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import Generate, ModelInfo
from refitd.config import ServerConfig

Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class Prompts:
    """Token ids by prompt, each in [0, vocabulary) and shorter than the context."""

    ids: list[list[int]]

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    def __len__(self) -> int:
        return len(self.ids)


def read_prompts(
    body: Generate, blobs: Sequence[Frame], model: ModelInfo, limits: ServerConfig, tokenize: Tokenize
) -> Prompts:
    """Raises `invalid_prompt` naming the prompt and what is wrong with it, or `limit_exceeded`."""
    as_text = body.texts is not None
    ids = _from_texts(body, blobs, limits, tokenize) if as_text else _from_blob(body, blobs, limits)
    for index, prompt in enumerate(ids):
        _check_prompt(index, prompt, model)
    return Prompts([prompt.tolist() for prompt in ids])


def _from_texts(
    body: Generate, blobs: Sequence[Frame], limits: ServerConfig, tokenize: Tokenize
) -> list[npt.NDArray[np.int32]]:
    assert body.texts is not None
    if body.prompt_lengths or blobs:
        raise _invalid_prompt("prompts come as texts or as token ids, not as both")
    _check_count(len(body.texts), limits)
    return [np.asarray(tokenize(text), dtype=np.int32) for text in body.texts]


def _from_blob(body: Generate, blobs: Sequence[Frame], limits: ServerConfig) -> list[npt.NDArray[np.int32]]:
    lengths = body.prompt_lengths
    _check_count(len(lengths), limits)
    if len(blobs) != 1:
        raise _invalid_prompt(f"token ids come in one blob, not in {len(blobs)}")
    if any(length < 0 for length in lengths) or sum(lengths) * 4 != len(blobs[0]):
        raise _invalid_prompt(f"prompt lengths add up to {sum(lengths)} int32 ids, the blob has {len(blobs[0])} bytes")
    ids = np.frombuffer(blobs[0], dtype="<i4")
    if len(lengths) == 1:
        return [ids]
    return np.split(ids, np.cumsum(lengths)[:-1])


def _check_count(prompts: int, limits: ServerConfig) -> None:
    if prompts == 0:
        raise _invalid_prompt("no prompt")
    if prompts > limits.max_prompts_per_request:
        raise ProtocolError(
            ErrorCode.LIMIT_EXCEEDED,
            f"{prompts} prompts in one request, at most {limits.max_prompts_per_request}",
            limit=limits.max_prompts_per_request,
        )


def _check_prompt(index: int, ids: npt.NDArray[np.int32], model: ModelInfo) -> None:
    if ids.size == 0:
        raise _invalid_prompt(f"prompt {index} is empty", prompt=index)
    if ids.size >= model.max_model_len:
        raise _invalid_prompt(
            f"prompt {index} has {ids.size} tokens, the context of {model.max_model_len} leaves no room to generate",
            prompt=index,
            max_model_len=model.max_model_len,
        )
    outside = np.flatnonzero((ids < 0) | (ids >= model.vocab_size))
    if outside.size:
        position = int(outside[0])
        raise _invalid_prompt(
            f"prompt {index}: id {int(ids[position])} at position {position} is not in [0, {model.vocab_size})",
            prompt=index,
            position=position,
        )


def _invalid_prompt(message: str, **details: object) -> ProtocolError:
    return ProtocolError(ErrorCode.INVALID_PROMPT, message, **details)
