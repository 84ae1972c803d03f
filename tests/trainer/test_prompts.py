"""What may be given as prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from refit_trainer import Sampling
from refit_trainer.prompts import generate_command


def test_lists_arrays_and_tensors_are_token_ids() -> None:
    """All prompts travel in one little-endian int32 blob."""
    command, blobs = generate_command([[1, 2], np.array([3], np.int64), torch.tensor([4, 5])], None, {})
    assert command.prompt_lengths == [2, 1, 2]
    assert np.frombuffer(blobs[0], "<i4").tolist() == [1, 2, 3, 4, 5]


def test_texts_travel_as_texts() -> None:
    """Without a blob."""
    command, blobs = generate_command(["one", "two"], Sampling(n=2), {"priority": 3})
    assert (command.texts, blobs, command.sampling.n, command.priority) == (["one", "two"], [], 2, 3)


@pytest.mark.parametrize("prompts", [[[]], []])
def test_empty_prompts_are_left_to_the_daemon_to_refuse(prompts: list[list[int]]) -> None:
    """They are well-formed; that they make no sense is the daemon's typed error, the same for every client."""
    command, blobs = generate_command(prompts, None, {})
    assert (command.prompt_lengths, blobs) == ([0] * len(prompts), [b""])


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ("text", TypeError),
        ([1, 2, 3], TypeError),
        ([[[1, 2]]], TypeError),
        (["text", [1]], TypeError),
        ([[1], "text"], TypeError),
        ([[1.5]], TypeError),
        ([[True]], TypeError),
        ([["1"]], TypeError),
        ([[2**40]], ValueError),
        ([[-(2**40)]], ValueError),
    ],
)
def test_what_is_no_prompt_is_refused_before_it_is_sent(prompts: object, error: type[Exception]) -> None:
    """Nothing is silently rounded, wrapped or split into characters."""
    with pytest.raises(error, match="prompt"):
        generate_command(prompts, None, {})
