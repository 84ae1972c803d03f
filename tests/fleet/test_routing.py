"""Where prompts go: sticky, spread, bounded."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_protocol.messages import Sampling
from refit_trainer.fleet.routing import PREFIX_TOKENS, Router, prefix_key, ranked, sequence_tokens

MEMBERS = ["ipc:///a", "ipc:///b", "ipc:///c"]
KEYS = [str(number).encode() for number in range(600)]


def test_a_key_goes_to_the_same_member_while_nobody_is_busy() -> None:
    """However the members are listed."""
    router = Router(slack_tokens=10**9)
    for key in KEYS:
        first = router.place(key, 100, MEMBERS, {})
        router.add(first, 100, 1)
        assert router.place(key, 100, MEMBERS[::-1], {}) == first


def test_keys_are_spread_evenly() -> None:
    counts = Counter(ranked(key, MEMBERS)[0] for key in KEYS)
    assert all(150 < counts[member] < 250 for member in MEMBERS)


@given(st.binary(max_size=40), st.sampled_from(MEMBERS))
def test_a_member_that_goes_moves_only_its_own_keys(key: bytes, gone: str) -> None:
    """What was elsewhere stays where it was."""
    before = ranked(key, MEMBERS)
    after = ranked(key, [member for member in MEMBERS if member != gone])
    assert after == [member for member in before if member != gone]


def test_one_popular_prefix_does_not_fill_one_member() -> None:
    """Beyond its share and the slack a prefix moves on, so no member gets more than the bound."""
    router = Router(slack_tokens=1000)
    for _ in range(300):
        router.add(router.place(b"system prompt", 100, MEMBERS, {}), 100, 1)
    loads = [router.load(member).tokens for member in MEMBERS]
    assert sum(loads) == 30_000
    assert max(loads) <= 1.25 * 30_000 / 3 + 100


def test_what_others_have_asked_for_counts() -> None:
    """The preferred member is busy with somebody else's work."""
    router = Router(slack_tokens=1000)
    preferred = ranked(b"key", MEMBERS)[0]
    assert router.place(b"key", 10, MEMBERS, {preferred: 500}) == preferred
    assert router.place(b"key", 10, MEMBERS, {preferred: 50_000}) == ranked(b"key", MEMBERS)[1]


def test_what_has_arrived_is_no_load() -> None:
    router = Router()
    router.add("a", 100, 2)
    router.add("a", -100, -2)
    assert (router.load("a").tokens, router.load("a").sequences) == (0, 0)


def test_prompts_that_begin_alike_belong_together() -> None:
    """By their first blocks, whatever holds the ids; a group overrides what they begin with."""
    beginning = list(range(PREFIX_TOKENS))
    assert prefix_key([*beginning, 1]) == prefix_key(np.array([*beginning, 2], np.int32))
    assert prefix_key([1, *beginning]) != prefix_key(beginning)
    assert prefix_key([1], group=7) == prefix_key("text", group=7)
    assert prefix_key("x" * 300 + "a") == prefix_key("x" * 300 + "b")


@pytest.mark.parametrize(
    ("prompt", "sampling", "tokens"),
    [
        ([1] * 10, Sampling(max_tokens=5), 15),
        ([1] * 10, Sampling(n=5, max_tokens=5), 7),
        ([1] * 10, Sampling(), 100),
        ([1] * 10, Sampling(max_tokens=500), 100),
        ("four" * 10, Sampling(max_tokens=5), 16),
        ([1] * 200, Sampling(), 201),
    ],
)
def test_cost_of_an_output(prompt: list[int] | str, sampling: Sampling, tokens: int) -> None:
    """In a context of 100 tokens; the prompt is shared by the outputs of a group."""
    assert sequence_tokens(prompt, sampling, 100) == tokens
