"""What comes back: order, indices, versions, reasons, times; and NaN as an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_trainer import Daemon, OutputIncomplete, Sampling, share_parameters
from tests.canary import unharmed
from tests.conftest import PROMPT
from tests.daemon_process import DaemonProcess
from tests.generation.conftest import greedy
from tests.worker.models import random_model

# More than one block of the KV cache, which holds 128 tokens on CPU.
LONG_PROMPT = list(range(3, 203))


def test_deltas_follow_each_other_and_join_to_the_sample(daemon: Daemon) -> None:
    """Positions leave no gap; ids, logprobs and versions of all deltas are those of the whole."""
    whole = greedy(daemon)
    deltas = list(daemon.stream([PROMPT], Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)))
    position = 0
    for delta in deltas:
        assert delta.position == position
        assert len(delta.token_ids) == len(delta.logprobs) == sum(run.count for run in delta.versions)
        position += len(delta.token_ids)
    assert [token for delta in deltas for token in delta.token_ids.tolist()] == whole.token_ids.tolist()
    assert [value for delta in deltas for value in delta.logprobs.tolist()] == pytest.approx(whole.logprobs, abs=1e-4)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert {run.version for delta in deltas for run in delta.versions} == {daemon.status().version}


def test_outputs_of_one_prompt_keep_their_indices_and_share_its_prefix(daemon: Daemon) -> None:
    """The first output computes the prompt's full block, the others find it."""
    samples = list(daemon.generate([LONG_PROMPT], Sampling(n=4, max_tokens=4, ignore_eos=True, seed=3)))
    assert sorted(sample.output for sample in samples) == [0, 1, 2, 3]
    assert {sample.prompt for sample in samples} == {0}
    assert sorted(sample.cached_tokens for sample in samples)[1:] == [128, 128, 128]


def test_cached_tokens_are_counted(daemon: Daemon) -> None:
    """None after a reset, a block once the prompt is known."""
    daemon.reset_prefix_cache()
    assert [greedy(daemon, LONG_PROMPT).cached_tokens for _ in range(2)] == [0, 128]


def test_counts_and_times_come_at_the_end(daemon: Daemon) -> None:
    replies = daemon.generate([PROMPT, [7]], Sampling(n=2, max_tokens=5, ignore_eos=True))
    list(replies)
    finished = replies.finished
    assert (finished.outputs, finished.prompt_tokens, finished.generated_tokens) == (4, len(PROMPT) + 1, 20)
    assert 0 < finished.first_token_milliseconds < finished.total_milliseconds


def test_text_goes_in_and_comes_out(daemon: Daemon, tokenizer: object) -> None:
    """A prompt given as text is the prompt of its token ids."""
    text = "The daemon owns the engine"
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True, text=True)
    sample = daemon.generate_one(text, sampling)
    assert sample.token_ids.tolist() == greedy(daemon, tokenizer.encode(text), max_tokens=8).token_ids.tolist()
    assert sample.text


# --- not a number ---


@pytest.fixture
def serving_nan(daemon: Daemon, weights_a: PreTrainedModel) -> Iterator[None]:
    """Weights that are no numbers, let through; afterwards weights A again."""
    broken = share_parameters(random_model("qwen3", seed=0))
    with torch.no_grad():
        broken.get_output_embeddings().weight.fill_(float("nan"))
    daemon.refit(broken, check_finite=False)
    yield
    daemon.refit(weights_a)


@pytest.mark.usefixtures("serving_nan")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_that_are_no_numbers_are_an_error(daemon: Daemon, temperature: float) -> None:
    """The output ends at once with a reason a program can read, which is raised unless asked for."""
    sampling = Sampling(temperature=temperature, max_tokens=12, stop=["x"], text=True)
    with pytest.raises(OutputIncomplete, match="not_a_number"):
        daemon.generate_one(PROMPT, sampling)
    sample = daemon.generate_one(PROMPT, sampling, incomplete="yield")
    assert (sample.finish_reason, sample.error) == ("error", ErrorCode.NOT_A_NUMBER)
    assert len(sample.token_ids) == 1


def test_after_nan_the_engine_is_as_before(
    daemon: Daemon, daemon_process: DaemonProcess, weights_a: PreTrainedModel
) -> None:
    """A refit brings numbers back, and nothing of the others stays in a cache; the finite check would have refused."""
    before = greedy(daemon)
    broken = share_parameters(random_model("qwen3", seed=0))
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    with unharmed(daemon), pytest.raises(Exception, match="not_finite"):
        daemon.refit(broken, check_finite=True)
    daemon.refit(broken, check_finite=False)
    with pytest.raises(OutputIncomplete, match="not_a_number"):
        greedy(daemon)
    daemon.refit(weights_a)
    assert greedy(daemon).logprobs.tolist() == before.logprobs.tolist()
