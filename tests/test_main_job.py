"""The main job, end to end: real trainer model, real sockets, real engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.messages import VersionRun
from refit_trainer import Daemon, Sampling
from tests.conftest import GREEDY, PROMPT, load_seed
from tests.daemon_process import DaemonProcess
from tests.markov import follows, make_markov
from tests.worker.models import random_model

# bf16 has 8 bits of mantissa; the engine and transformers add up in different orders.
LOGPROB_TOLERANCE = 0.15


def reference_logprobs(model: PreTrainedModel, prompt: list[int], generated: list[int]) -> np.ndarray:
    """What transformers says of the generated tokens."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + generated])).logits[0].float()
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return rows[torch.arange(len(generated)), torch.tensor(generated)].numpy()


def test_refits_are_exact_from_a_to_b_and_back(
    daemon: Daemon, model: PreTrainedModel, fresh_sample: tuple[list[int], list[float]]
) -> None:
    """After A, B, A the engine's greedy ids and logprobs equal, bit for bit, those of a daemon just started on A."""
    daemon.refit(model)
    first = daemon.generate_one(PROMPT, GREEDY)
    assert (first.token_ids.tolist(), first.logprobs.tolist()) == fresh_sample

    load_seed(model, 1)
    daemon.refit(model)
    other = daemon.generate_one(PROMPT, GREEDY)
    assert other.token_ids.tolist() != first.token_ids.tolist()

    load_seed(model, 0)
    daemon.refit(model)
    again = daemon.generate_one(PROMPT, GREEDY)
    assert (again.token_ids.tolist(), again.logprobs.tolist()) == fresh_sample


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_the_engine_computes_what_the_trainer_computes(daemon: Daemon, model: PreTrainedModel, seed: int) -> None:
    """Logprobs of the engine's tokens agree with transformers' on the weights just pushed, refit after refit."""
    load_seed(model, seed)
    daemon.refit(model)
    sample = daemon.generate_one(PROMPT, GREEDY)
    expected = reference_logprobs(model, PROMPT, sample.token_ids.tolist())
    assert np.abs(sample.logprobs - expected).max() < LOGPROB_TOLERANCE
    stale = reference_logprobs(random_model("qwen3", seed=9), PROMPT, sample.token_ids.tolist())
    assert np.abs(sample.logprobs - stale).max() > LOGPROB_TOLERANCE


def test_in_place_steps_are_seen_by_the_next_refit(daemon: Daemon, model: PreTrainedModel) -> None:
    """An optimiser that updates shared parameters in place needs no more than the next `refit`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = daemon.refit(model)
    ids = torch.tensor([PROMPT])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    after = daemon.refit(model)
    assert after.version == before.version + 1
    assert after.digest != before.digest
    assert after.digest == daemon.digest().digest
    sample = daemon.generate_one(PROMPT, GREEDY)
    expected = reference_logprobs(model, PROMPT, sample.token_ids.tolist())
    assert np.abs(sample.logprobs - expected).max() < LOGPROB_TOLERANCE


def test_every_token_fits_the_version_it_is_stamped_with(daemon: Daemon, model: PreTrainedModel) -> None:
    """With running streams refitted again and again, each token follows the permutation of its own version."""
    permutations = {}

    def refit(seed: int) -> None:
        successors = make_markov(model, seed)
        permutations[daemon.refit(model, policy="keep").version] = successors

    refit(0)
    sampling = Sampling(n=4, max_tokens=200, temperature=0.0, ignore_eos=True)
    stream = daemon.stream([[5], [77]], sampling)
    last = {(prompt, output): [5, 77][prompt] for prompt in range(2) for output in range(4)}
    seen: set[int] = set()
    for position, delta in enumerate(stream):
        if position in (10, 40, 80):
            refit(position)
        tokens = iter(delta.token_ids.tolist())
        for run in delta.versions:
            seen.add(run.version)
            for token in [next(tokens) for _ in range(run.count)]:
                previous, last[delta.prompt, delta.output] = last[delta.prompt, delta.output], token
                assert follows(permutations[run.version], previous, token), (
                    f"version {run.version} did not make {token}"
                )
    assert len(seen) >= 2, "the streams ended before a refit reached them"


def test_generation_streams_deltas_and_finishes(daemon: Daemon) -> None:
    """Deltas of one output join, in order, to the tokens of the unary reply; the last says why it ended."""
    whole = daemon.generate_one(PROMPT, GREEDY)
    deltas = list(daemon.stream([PROMPT], GREEDY))
    joined = np.concatenate([delta.token_ids for delta in deltas])
    assert joined.tolist() == whole.token_ids.tolist()
    assert [delta.finish_reason for delta in deltas][-1] == "length"
    assert whole.finish_reason == "length"
    assert whole.versions == [VersionRun(daemon.status().version, len(whole.token_ids))]
    assert (whole.logprobs <= 0).all()


def test_batches_keep_their_indices(daemon: Daemon) -> None:
    """Many prompts with several samples each come back complete, each under its own indices."""
    prompts = [[token] for token in range(3, 11)]
    samples = list(daemon.generate(prompts, Sampling(n=3, max_tokens=4, ignore_eos=True)))
    assert {(sample.prompt, sample.output) for sample in samples} == {(p, o) for p in range(8) for o in range(3)}
    assert all(len(sample.token_ids) == 4 for sample in samples)


def test_cancel_ends_the_stream_and_frees_the_engine(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """A cancelled stream ends as cancelled with the tokens so far, and leaves the engine."""
    stream = daemon.stream([PROMPT], Sampling(max_tokens=200, ignore_eos=True))
    received = [next(stream)]
    stream.cancel()
    received += list(stream)
    assert received[-1].finish_reason == "cancelled"
    assert sum(len(delta.token_ids) for delta in received) < 200
    assert daemon_process.status().running_requests == 0


def test_max_tokens_is_clamped_to_the_context_and_said(daemon: Daemon) -> None:
    """A budget beyond the context is cut to what is left, and the reply says so."""
    stream = daemon.stream([[7] * 250], Sampling(max_tokens=1000, ignore_eos=True))
    tokens = sum(len(delta.token_ids) for delta in stream)
    assert stream.resolved is not None
    assert stream.resolved.clamped == [True]
    assert stream.resolved.max_tokens == [6]
    assert tokens == 6
