"""Prompts are checked before the engine sees them."""

from __future__ import annotations

import numpy as np
import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import Generate, ModelInfo
from refitd.config import ServerConfig
from refitd.prompts import Prompts, read_prompts

MODEL = ModelInfo(name="m", vocab_size=100, max_model_len=10, dtype="bfloat16", eos_token_ids=[2, 5])


def no_text(_text: str) -> list[int]:
    raise AssertionError("no text was sent")


def read(lengths: list[int], ids: list[int]) -> Prompts:
    blob = np.array(ids, dtype="<i4").tobytes()
    return read_prompts(Generate(prompt_lengths=lengths), [blob], MODEL, ServerConfig(), no_text)


def test_one_blob_holds_all_prompts() -> None:
    """Cut by their lengths."""
    assert read([2, 1, 3], [1, 2, 3, 4, 5, 6]).ids == [[1, 2], [3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("lengths", "ids", "named"),
    [
        ([], [], "no prompt"),
        ([1, 0], [1], "prompt 1 is empty"),
        ([2], [1], "add up"),
        ([-1, 2], [1], "add up"),
        ([2], [1, 100], "id 100 at position 1"),
        ([1, 1], [1, -1], "prompt 1: id -1"),
        ([10], list(range(10)), "no room"),
    ],
)
def test_what_cannot_be_a_prompt_is_named(lengths: list[int], ids: list[int], named: str) -> None:
    """Which prompt, which position, and why."""
    with pytest.raises(ProtocolError, match=named) as refused:
        read(lengths, ids)
    assert refused.value.code is ErrorCode.INVALID_PROMPT


def test_too_many_prompts_are_a_limit() -> None:
    """Said with the limit."""
    with pytest.raises(ProtocolError) as refused:
        read_prompts(
            Generate(prompt_lengths=[1, 1]), [bytes(8)], MODEL, ServerConfig(max_prompts_per_request=1), no_text
        )
    assert refused.value.code is ErrorCode.LIMIT_EXCEEDED
    assert refused.value.details["limit"] == 1


def test_texts_are_tokenized() -> None:
    """By the engine's tokenizer."""
    prompts = read_prompts(Generate(texts=["ab"]), [], MODEL, ServerConfig(), lambda text: [ord(c) - 90 for c in text])
    assert prompts.ids == [[7, 8]]
