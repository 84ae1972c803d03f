"""Many prompts in one request: indices, deadlines, cancelling, and the versions a request may demand."""

from __future__ import annotations

import pytest

from refit_protocol.errors import ErrorCode
from refit_trainer import Daemon, OutputIncomplete, RefitdError, Sampling
from tests.conftest import PROMPT
from tests.generation.conftest import greedy

ENDLESS = Sampling(max_tokens=240, ignore_eos=True)


def test_each_result_names_its_prompt(daemon: Daemon) -> None:
    """Twelve prompts, two outputs each: every result begins as the one that its prompt gets alone.

    Begins, because a matrix product rounds otherwise in another batch, and a later token may follow from that.
    """
    prompts = [[5 + index, 60, 7] for index in range(12)]
    sampling = Sampling(n=2, max_tokens=6, temperature=0.0, ignore_eos=True)
    samples = list(daemon.generate(prompts, sampling))
    assert sorted((sample.prompt, sample.output) for sample in samples) == [(p, n) for p in range(12) for n in (0, 1)]
    alone = {index: greedy(daemon, prompts[index], max_tokens=1).token_ids.tolist() for index in range(12)}
    assert len({tuple(ids) for ids in alone.values()}) > 1
    for sample in samples:
        assert sample.token_ids[:1].tolist() == alone[sample.prompt]


def test_results_come_as_they_are_ready(daemon: Daemon) -> None:
    """A prompt whose context is nearly full is done long before the others."""
    samples = daemon.generate([[5], [6], [7] * 250], ENDLESS)
    assert next(samples).prompt == 2
    samples.close()


def test_a_deadline_ends_a_request_with_what_it_has(daemon: Daemon) -> None:
    """Unfinished outputs are cancelled and say why; finished ones are not touched; the engine is free again."""
    asked = daemon.generate([[7] * 255, [5]], ENDLESS, deadline_seconds=0.1, incomplete="yield")
    samples = {sample.prompt: sample for sample in asked}
    assert samples[0].complete
    assert not samples[1].complete
    assert samples[1].finish_reason == "cancelled"
    assert samples[1].error is ErrorCode.DEADLINE_EXCEEDED
    assert len(samples[1].token_ids) == len(samples[1].logprobs) < 240
    assert daemon.status().running_requests == 0


def test_what_a_deadline_cuts_off_is_no_sample_unless_asked_for(daemon: Daemon) -> None:
    """All that is whole comes first; then an error, which has what there is of the rest."""
    asked = daemon.generate([[7] * 255, [5], [6]], ENDLESS, deadline_seconds=0.1)
    assert next(asked).prompt == 0
    with pytest.raises(OutputIncomplete, match="deadline_exceeded: output 0 of prompt 1 and 1 more ended") as cut_off:
        next(asked)
    assert cut_off.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert cut_off.value.retryable
    assert [sample.prompt for sample in cut_off.value.samples] == [1, 2]
    assert all(len(sample.token_ids) < 240 for sample in cut_off.value.samples)
    assert list(asked) == []
    assert daemon.status().running_requests == 0


def test_cancelling_one_request_leaves_the_others(daemon: Daemon) -> None:
    cancelled, kept = (
        daemon.stream([PROMPT], ENDLESS),
        daemon.stream([PROMPT], Sampling(max_tokens=30, ignore_eos=True)),
    )
    next(cancelled)
    cancelled.cancel()
    assert list(cancelled)[-1].finish_reason == "cancelled"
    assert list(kept)[-1].finish_reason == "length"


def test_cancelling_all_ends_every_request_of_the_session(daemon: Daemon) -> None:
    streams = [daemon.stream([PROMPT], ENDLESS) for _ in range(3)]
    for stream in streams:
        next(stream)
    assert len(daemon.cancel()) == 3
    assert [list(stream)[-1].finish_reason for stream in streams] == ["cancelled"] * 3
    assert daemon.status().running_requests == 0


def test_cancelled_text_is_the_text_of_its_tokens(daemon: Daemon) -> None:
    """What was held back because a stop string might have begun with it comes with the end."""
    letters = Sampling(
        max_tokens=240, ignore_eos=True, text=True, allowed_token_ids=list(range(60, 95)), stop=["~" * 30]
    )
    stream = daemon.stream([PROMPT], letters)
    deltas = [next(stream)]
    while sum(len(delta.token_ids) for delta in deltas) < 10:
        deltas.append(next(stream))
    stream.cancel()
    deltas += list(stream)
    tokens = sum(len(delta.token_ids) for delta in deltas)
    assert len("".join(delta.text for delta in deltas)) == tokens


def test_a_version_that_does_not_come_is_refused_at_the_deadline(daemon: Daemon) -> None:
    version = daemon.status().version
    with pytest.raises(RefitdError) as refused:
        daemon.generate_one(PROMPT, ENDLESS, min_version=version + 1, deadline_seconds=0.2)
    assert refused.value.code is ErrorCode.VERSION_UNAVAILABLE
    assert refused.value.retryable


def test_a_request_may_allow_the_engine_to_lag(daemon: Daemon) -> None:
    """The trainer's version less the lag is enough."""
    version = daemon.status().version
    one = Sampling(max_tokens=1)
    assert daemon.generate_one(PROMPT, one, min_version=version + 2, max_version_lag=2).version == version
    with pytest.raises(RefitdError, match="version_unavailable"):
        daemon.generate_one(PROMPT, one, min_version=version + 3, max_version_lag=2, deadline_seconds=0.2)
