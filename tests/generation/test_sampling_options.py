"""Every sampling option reaches the engine: each test sees its effect on tokens or logprobs."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from refit_protocol.messages import StructuredOutputs
from refit_trainer import Daemon, Delta, Sampling
from tests.conftest import PROMPT
from tests.generation.conftest import CLOSE, Reference, greedy, hot
from tests.tiny_tokenizer import EOS_TOKEN_IDS

ENDOFTEXT, IM_END = EOS_TOKEN_IDS


# --- randomness ---


def test_temperature_zero_repeats_itself_and_one_does_not(daemon: Daemon) -> None:
    """Greedy samples are all alike; of eight hot ones no two are."""
    cold = Sampling(n=3, max_tokens=12, temperature=0.0, ignore_eos=True)
    assert len({tuple(sample.token_ids) for sample in daemon.generate([PROMPT], cold)}) == 1
    warm = Sampling(n=8, max_tokens=12, ignore_eos=True)
    assert len({tuple(sample.token_ids) for sample in daemon.generate([PROMPT], warm)}) == 8


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_options_that_leave_one_token_make_hot_sampling_greedy(daemon: Daemon, narrow: dict[str, float]) -> None:
    """The only candidate is the most likely one, and it is certain."""
    sample = hot(daemon, **narrow)
    assert sample.token_ids.tolist() == greedy(daemon).token_ids.tolist()
    assert sample.logprobs.tolist() == pytest.approx([0.0] * 12, abs=1e-4)


def test_temperature_divides_the_logits_before_logprobs_are_taken(daemon: Daemon, reference: Reference) -> None:
    """The mode that the daemon echoes is `processed_logprobs`: log_softmax(logits / T)."""
    replies = daemon.generate([PROMPT], Sampling(max_tokens=12, temperature=0.6, ignore_eos=True))
    (sample,) = list(replies)
    assert replies.finished.resolved.logprobs_mode == "processed_logprobs"
    expected = torch.log_softmax(reference.next_logits(sample) / 0.6, -1)
    taken = expected.gather(1, torch.tensor(sample.token_ids.tolist())[:, None])[:, 0]
    assert sample.logprobs == pytest.approx(taken.numpy(), abs=CLOSE / 0.6)


def test_a_seed_reproduces_and_each_output_has_its_own(daemon: Daemon) -> None:
    """Four outputs of one seed differ from each other; asked again they are the same four."""

    def tokens(seed: int) -> dict[int, tuple[int, ...]]:
        sampling = Sampling(n=4, seed=seed, max_tokens=12, ignore_eos=True)
        return {sample.output: tuple(sample.token_ids) for sample in daemon.generate([PROMPT], sampling)}

    first = tokens(11)
    assert len(set(first.values())) == 4
    assert tokens(11) == first
    assert tokens(500) != first


# --- changes of the logits, against transformers ---


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 3.0}],
    ids=lambda penalty: next(iter(penalty)),
)
def test_penalties_are_those_of_their_definition(
    daemon: Daemon, reference: Reference, penalty: dict[str, float]
) -> None:
    """Greedy tokens and their logprobs are those of transformers' logits with the penalty taken off by hand."""
    repeating = {"logit_bias": [(7, 6.0), (9, 6.0)], "max_tokens": 24}
    sample = greedy(daemon, **repeating, **penalty)
    assert sample.token_ids.tolist() != greedy(daemon, **repeating).token_ids.tolist()
    logits = reference.next_logits(sample)
    logits[:, [7, 9]] += 6.0
    for index, token in enumerate(sample.token_ids.tolist()):
        row = penalised(logits[index], sample.token_ids[:index].tolist(), **penalty)
        assert row[token] > row.max() - CLOSE
        assert sample.logprobs[index] == pytest.approx(torch.log_softmax(row, -1)[token].item(), abs=2 * CLOSE)


def penalised(
    row: torch.Tensor,
    generated: list[int],
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
) -> torch.Tensor:
    counts = torch.bincount(torch.tensor(generated, dtype=torch.long), minlength=len(row))
    seen = counts + torch.bincount(torch.tensor(PROMPT), minlength=len(row)) > 0
    row = torch.where(seen, torch.where(row > 0, row / repetition_penalty, row * repetition_penalty), row)
    return row - frequency_penalty * counts - presence_penalty * (counts > 0)


def test_a_bias_can_force_a_token(daemon: Daemon) -> None:
    assert hot(daemon, logit_bias=[(123, 100.0)]).token_ids.tolist() == [123] * 12


def test_only_allowed_tokens_are_sampled(daemon: Daemon) -> None:
    allowed = [40, 41, 42]
    tokens = set(hot(daemon, allowed_token_ids=allowed, max_tokens=60).token_ids.tolist())
    assert tokens <= set(allowed)
    assert len(tokens) > 1


def test_bad_words_do_not_come(daemon: Daemon, tokenizer: PreTrainedTokenizerFast) -> None:
    """A bias makes one word all but certain; forbidden, it never comes."""
    token, word = next(
        (token, word)
        for token in range(300, 400)
        if (word := tokenizer.decode([token])).isalpha() and tokenizer.encode(word, add_special_tokens=False) == [token]
    )
    biased = {"logit_bias": [(token, 100.0)], "text": True}
    assert greedy(daemon, **biased).text == word * 12
    assert token not in greedy(daemon, **biased, bad_words=[word]).token_ids.tolist()


# --- the end of an output ---


@pytest.mark.parametrize("end", EOS_TOKEN_IDS)
def test_every_eos_of_the_model_ends_an_output(daemon: Daemon, end: int) -> None:
    """Also the one that the tokenizer does not name; the reason says which it was, the stop set is echoed."""
    replies = daemon.generate([PROMPT], Sampling(max_tokens=12, logit_bias=[(end, 100.0)]))
    (sample,) = list(replies)
    assert (sample.token_ids.tolist(), sample.finish_reason, sample.stop_reason) == ([end], "stop", end)
    assert replies.finished.resolved.stop_token_ids == sorted(EOS_TOKEN_IDS)


def test_ignore_eos_goes_on_to_the_limit(daemon: Daemon) -> None:
    sample = hot(daemon, logit_bias=[(IM_END, 100.0)])
    assert (sample.token_ids.tolist(), sample.finish_reason, sample.stop_reason) == ([IM_END] * 12, "length", None)


def test_min_tokens_keeps_stops_away(daemon: Daemon) -> None:
    """EOS, though all but certain, comes as soon as it may and not before."""
    sampling = Sampling(max_tokens=12, min_tokens=4, logit_bias=[(ENDOFTEXT, 100.0)])
    sample = daemon.generate_one(PROMPT, sampling)
    assert sample.token_ids.tolist().index(ENDOFTEXT) == len(sample.token_ids) - 1 == 4


def test_a_stop_id_ends_an_output_and_belongs_to_it(daemon: Daemon) -> None:
    tokens = greedy(daemon).token_ids.tolist()
    stop = tokens[4]
    sample = greedy(daemon, stop_token_ids=[stop, 510])
    assert sample.token_ids.tolist() == tokens[: tokens.index(stop) + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


def test_max_tokens_is_clamped_to_the_context_and_said_so(daemon: Daemon) -> None:
    """Two prompts of one batch have different room; without a limit the context is the limit."""
    long = [5] * 250
    for asked, clamped in ((100, [True, False]), (None, [False, False])):
        replies = daemon.generate([long, PROMPT], Sampling(max_tokens=asked, temperature=0.0, ignore_eos=True))
        lengths = {sample.prompt: len(sample.token_ids) for sample in replies}
        resolved = replies.finished.resolved
        assert replies.resolved == resolved
        assert lengths == dict(enumerate(resolved.max_tokens)) == {0: 6, 1: asked or 251}
        assert resolved.clamped == clamped


# --- stop strings ---


@pytest.fixture(scope="module")
def chatty() -> dict[str, object]:
    """A bias towards plain words, so that greedy text is readable: the tokens of the alphabet."""
    return {"allowed_token_ids": list(range(60, 95)), "max_tokens": 40, "text": True}


def test_a_stop_string_cuts_text_and_tokens_across_token_borders(
    daemon: Daemon, tokenizer: PreTrainedTokenizerFast, chatty: dict[str, object]
) -> None:
    """The text ends before it; the tokens end with the one that completed it, and no logprob is left over."""
    whole = greedy(daemon, **chatty)
    stop = whole.text[9:13]
    end = whole.text.index(stop)
    sample = greedy(daemon, **chatty, stop=[stop, "never this"])
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (whole.text[:end], "stop", stop)
    assert sample.token_ids.tolist() == whole.token_ids[: len(sample.token_ids)].tolist()
    assert tokenizer.decode(sample.token_ids) == whole.text[: end + len(stop)]
    assert len(sample.logprobs) == len(sample.token_ids) == sum(run.count for run in sample.versions)


def test_a_stop_string_can_be_kept(daemon: Daemon, chatty: dict[str, object]) -> None:
    whole = greedy(daemon, **chatty)
    stop = whole.text[9:13]
    sample = greedy(daemon, **chatty, stop=[stop], include_stop_str_in_output=True)
    assert sample.text == whole.text[: whole.text.index(stop) + len(stop)]


def test_a_stop_string_works_without_text(daemon: Daemon, chatty: dict[str, object]) -> None:
    whole = greedy(daemon, **chatty)
    sample = greedy(daemon, **{**chatty, "text": False}, stop=[whole.text[9:13]])
    assert (sample.text, sample.finish_reason) == (None, "stop")
    assert len(sample.token_ids) < 40


def test_text_deltas_never_show_a_part_of_a_stop_string(daemon: Daemon, chatty: dict[str, object]) -> None:
    """What might be its beginning is held back until it is decided; joined, the deltas are the text."""
    whole = greedy(daemon, **chatty)
    stop = whole.text[9:13]
    sampling = Sampling(temperature=0.0, ignore_eos=True, stop=[stop], **chatty)
    joined = "".join(delta.text for delta in daemon.stream([PROMPT], sampling))
    assert joined == whole.text[: whole.text.index(stop)]
    undecided = Sampling(temperature=0.0, ignore_eos=True, stop=[whole.text[-2:] + "zzzz"], **chatty)
    assert "".join(delta.text for delta in daemon.stream([PROMPT], undecided)) == whole.text


def test_special_tokens_are_text_only_if_wanted(daemon: Daemon) -> None:
    sampling = {"logit_bias": [(IM_END, 100.0)], "max_tokens": 2, "text": True}
    assert greedy(daemon, **sampling).text == ""
    assert greedy(daemon, **sampling, skip_special_tokens=False).text == "<|im_end|>" * 2


# --- logprobs ---


def test_top_logprobs_are_those_of_transformers(daemon: Daemon, reference: Reference) -> None:
    """Five alternatives a token, best first; in greedy sampling the best is the token itself."""
    sample = greedy(daemon, logprobs=5)
    expected = torch.log_softmax(reference.next_logits(sample), -1)
    assert sample.top.token_ids.shape == sample.top.logprobs.shape == (12, 5)
    assert sample.top.token_ids[:, 0].tolist() == sample.token_ids.tolist()
    assert (np.diff(sample.top.logprobs) <= 0).all()
    taken = expected.gather(1, torch.tensor(sample.top.token_ids.tolist()))
    assert sample.top.logprobs == pytest.approx(taken.numpy(), abs=CLOSE)
    assert sample.top.logprobs == pytest.approx(expected.topk(5).values.numpy(), abs=CLOSE)
    assert sample.logprobs.tolist() == sample.top.logprobs[:, 0].tolist()


@pytest.mark.parametrize("prompt", [PROMPT, list(range(3, 203))], ids=["short", "longer than a block"])
def test_prompt_logprobs_are_those_of_transformers(daemon: Daemon, reference: Reference, prompt: list[int]) -> None:
    """A row a prompt token, itself first; the first token has none. Asked twice, so that the cache is warm."""
    for _ in range(2):
        rows = greedy(daemon, prompt, prompt_logprobs=2).prompt_logprobs
        assert rows.token_ids.shape == (len(prompt), 3)
        assert rows.token_ids[:, 0].tolist() == prompt
        assert np.isnan(rows.logprobs[0]).all()
        expected = torch.log_softmax(reference.logits(prompt), -1)[:-1]
        taken = expected.gather(1, torch.tensor(rows.token_ids[1:].tolist()))
        assert rows.logprobs[1:] == pytest.approx(taken.numpy(), abs=CLOSE)


def test_a_prompt_of_one_token_has_one_row_without_logprob(daemon: Daemon) -> None:
    rows = greedy(daemon, [5], prompt_logprobs=1).prompt_logprobs
    assert rows.token_ids[:, 0].tolist() == [5]
    assert np.isnan(rows.logprobs).all()


# --- structured outputs ---


@pytest.fixture(scope="module")
def no_blanks(tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, float]]:
    """A bias against white space, of which JSON may hold any amount between its parts."""
    return [(token, -100.0) for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip(" \t\r\n")]


def structured(daemon: Daemon, seed: int, bias: list[tuple[int, float]] | None = None, **constraint: object) -> str:
    limited = StructuredOutputs(**constraint)
    sampling = Sampling(max_tokens=120, seed=seed, text=True, logit_bias=bias or [], structured=limited)
    sample = daemon.generate_one(PROMPT, sampling)
    assert sample.finish_reason == "stop"
    assert sample.text is not None
    return sample.text


@pytest.mark.parametrize("seed", [1, 2])
def test_a_regular_expression_is_kept_to(daemon: Daemon, seed: int) -> None:
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", structured(daemon, seed, regex="[0-9]{3}-[a-c]{2}"))


def test_one_of_the_choices_comes(daemon: Daemon) -> None:
    assert structured(daemon, 1, choice=["yes", "no"]) in ("yes", "no")


@pytest.mark.parametrize("as_text", [False, True])
def test_json_follows_its_schema(daemon: Daemon, no_blanks: list[tuple[int, float]], as_text: bool) -> None:
    schema = {
        "type": "object",
        "properties": {
            "verdict": {"enum": ["right", "wrong"]},
            "points": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 3},
        },
        "required": ["verdict", "points"],
        "additionalProperties": False,
    }
    answer = json.loads(structured(daemon, 3, no_blanks, json=json.dumps(schema) if as_text else schema))
    assert answer["verdict"] in ("right", "wrong")
    assert set(answer["points"]) <= {0, 1}


def test_a_grammar_is_kept_to(daemon: Daemon) -> None:
    assert structured(daemon, 1, grammar='root ::= "a" ("b" | "c") "d"') in ("abd", "acd")


def test_characters_split_over_tokens_come_whole(daemon: Daemon) -> None:
    """Each character is several tokens of one byte; no delta holds a part of one, and joined they are the text."""
    text = "é€😀 ü"
    sampling = Sampling(max_tokens=40, text=True, structured=StructuredOutputs(choice=[text]))
    deltas = list(daemon.stream([PROMPT], sampling))
    assert sum(len(delta.token_ids) for delta in deltas) > len(text)
    assert "".join(delta.text for delta in deltas) == text
    assert all("\ufffd" not in delta.text for delta in deltas)


# --- scheduling ---


def test_a_request_of_higher_priority_overtakes(daemon: Daemon) -> None:
    """The engine is full; of two that wait, the later one with the smaller number gets the place that falls free."""
    full = daemon.stream([PROMPT], Sampling(n=63, max_tokens=120, ignore_eos=True))
    leaving = daemon.stream([PROMPT], Sampling(max_tokens=40, ignore_eos=True))
    next(leaving)
    one = Sampling(max_tokens=1)
    low, high = daemon.stream([PROMPT], one, priority=5), daemon.stream([PROMPT], one, priority=-5)
    (first,), (second,) = list(high), list(low)
    assert isinstance(first, Delta)
    assert high.finished.total_milliseconds < low.finished.total_milliseconds
    assert second.finish_reason == "length"
    full.close()
