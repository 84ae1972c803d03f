"""What one output keeps, and what of it a client is sent again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import Generate, ResolvedSampling, Sampling
from refitd.output import Job, Output
from refitd.prompts import Prompts


@dataclass
class Rows:
    logprob_token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass
class PromptRows:
    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor


@dataclass
class Step:
    new_token_ids: list[int]
    new_logprobs: Rows | None = None
    new_prompt_logprobs_tensors: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prefill_stats: Any = None
    routed_experts: np.ndarray | None = None
    request_id: str = "one"
    num_nans_in_logits: int = 0


class Letters:
    """Token i is letter i; two are held back until the end, as if a stop string might have begun."""

    def __init__(self) -> None:
        self._text, self._told = "", 0

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:  # noqa: ARG002
        self._text += "".join(chr(ord("a") + token) for token in new_token_ids)
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:  # noqa: ARG002
        end = max(self._told, len(self._text) - (0 if finished else 2))
        fresh, self._told = self._text[self._told : end], end
        return fresh

    def num_output_tokens(self) -> int:
        return len(self._text)


@pytest.fixture
def output() -> Output:
    body = Generate(sampling=Sampling(text=True), routed_experts=True)
    resolved = ResolvedSampling(max_tokens=[9], clamped=[False], stop_token_ids=[], logprobs_mode="")
    only = Job(None, 1, body, Prompts([[5, 6]]), resolved).outputs[0]
    only.detokenizer = Letters()
    return only


def tokens(*ids: int, **more: Any) -> Step:
    return Step(list(ids), Rows(np.array([[i] for i in ids]), np.full((len(ids), 1), -0.5)), **more)


def test_a_resumed_client_gets_the_text_that_it_lost(output: Output) -> None:
    """Text belongs to the tokens after which it was sent, wherever the client's cursor stands."""
    sent = []
    for ids in ((0, 1, 2), (3,), (4, 5)):
        output.take(tokens(*ids), 1)
        sent.append(output.delta().text)
    assert sent == ["a", "b", "cd"]
    output.rewind(3)
    assert output.delta().text == "bcd"
    output.rewind(0)
    assert output.delta().text == "abcd"


def test_cancelling_sends_the_text_that_was_held_back(output: Output) -> None:
    output.take(tokens(0, 1, 2), 1)
    assert output.delta().text == "a"
    output.cancel(None)
    ended = output.delta()
    assert (ended.text, ended.count, ended.finish_reason) == ("bc", 0, "cancelled")


def test_chunks_of_routed_experts_are_joined(output: Output) -> None:
    """The engine hands them on step by step; the client gets the shape of all with the end."""
    output.take(tokens(0, routed_experts=np.zeros((2, 3, 4))), 1)
    assert output.delta().routed_experts is None
    output.take(tokens(1, routed_experts=np.ones((1, 3, 4)), finish_reason="length"), 1)
    assert output.delta().routed_experts == [3, 3, 4]


def test_a_stop_names_the_token_that_it_was(output: Output) -> None:
    """Also where vLLM leaves it out, for the first of the model's EOS ids."""
    output.take(tokens(0, 7, finish_reason="stop"), 1)
    assert (output.finish_reason, output.stop_reason) == ("stop", 7)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_an_output_that_the_engine_gives_up_has_a_code(output: Output, reason: str) -> None:
    """What is cancelled by us is forgotten before vLLM hears of it: an abort that it tells us of is its own."""
    output.take(Step([], finish_reason=reason), 1)
    assert (output.finish_reason, output.error) == ("error", ErrorCode.ENGINE_ERROR)


def test_nan_is_the_end_whatever_else_the_step_says(output: Output) -> None:
    step = tokens(0, finish_reason="stop")
    assert step.new_logprobs is not None
    step.new_logprobs.logprobs[:] = np.nan
    output.take(step, 1)
    assert (output.finish_reason, output.error) == ("error", ErrorCode.NOT_A_NUMBER)


def test_all_that_is_kept_counts(output: Output) -> None:
    """Ids, logprobs and text of each token, the routed experts as they come, and the prompt's logprobs."""
    job = output.job
    output.take(tokens(0, 1, 2), 1)
    assert job.size_bytes == 3 * (8 + 8) + 4 * len("a")
    output.take(tokens(3, routed_experts=np.zeros((2, 3, 4))), 1)
    assert job.size_bytes == 4 * (8 + 8) + 4 * len("ab") + 2 * 3 * 4 * 8
    before = job.size_bytes
    output.take(Step([], new_prompt_logprobs_tensors=PromptRows(torch.zeros(1, 6), torch.zeros(1, 6))), 1)
    assert job.size_bytes == before + 6 * 8


def test_what_only_the_engine_needed_goes_with_the_end(output: Output) -> None:
    """The client may be slow to acknowledge: prompts and their prepared forms do not stay until then."""
    job = output.job
    job.prepared[0] = "a request in the engine's form"
    output.take(tokens(0, finish_reason="length"), 1)
    job.output_finished()
    assert (job.prompt_ids, job.prepared, output.detokenizer) == ([], {}, None)
    assert job.finished([]).prompt_tokens == 2
    output.rewind(0)
    assert output.delta().text == "a"
