"""Which ids a request asks to keep, and whose they are."""

from __future__ import annotations

import pytest

from refitd.prefix import (
    EarlierTokens,
    PrefixError,
    TokenTexts,
    conversation_mismatch,
    earlier_tokens,
    without_words,
)
from tests.prefix.chat_styles import CLOSING_STYLES, decode, encode, render

VOCAB = 1000
USER = {"role": "user", "content": "hi"}
PLAIN = {"role": "assistant", "content": "hello"}
CARRYING = {**PLAIN, "prompt_token_ids": [1, 5], "generation_token_ids": [6, 2]}


def test_required_ids_belong_to_the_last_assistant_turn() -> None:
    assert earlier_tokens([USER, PLAIN, USER], [1, 2, 3], VOCAB) == EarlierTokens(1, [1, 2, 3])


@pytest.mark.parametrize("required", [None, []])
def test_without_ids_there_is_nothing_to_keep(required: object) -> None:
    assert earlier_tokens([USER, PLAIN, USER], required, VOCAB) is None


@pytest.mark.parametrize("name", ["generation_token_ids", "token_ids"])
def test_ids_carried_by_a_message_are_its_prompt_and_generation(name: str) -> None:
    carrying = {**PLAIN, "prompt_token_ids": [1, 5], name: [6, 2]}
    assert earlier_tokens([USER, carrying, USER], None, VOCAB) == EarlierTokens(1, [1, 5, 6, 2])


def test_the_latest_turn_that_carries_ids_counts_even_when_plain_turns_follow() -> None:
    latest = {**CARRYING, "prompt_token_ids": [1, 5, 6, 2, 9]}
    messages = [USER, CARRYING, USER, latest, USER, PLAIN, USER]
    assert earlier_tokens(messages, None, VOCAB) == EarlierTokens(3, [1, 5, 6, 2, 9, 6, 2])


def test_ids_on_other_roles_mean_nothing() -> None:
    assert earlier_tokens([{**USER, "prompt_token_ids": [1], "generation_token_ids": [2]}], None, VOCAB) is None


def test_required_and_carried_ids_may_agree_but_not_differ() -> None:
    assert earlier_tokens([USER, CARRYING], [1, 5, 6, 2], VOCAB) == EarlierTokens(1, [1, 5, 6, 2])
    with pytest.raises(PrefixError, match="differ"):
        earlier_tokens([USER, CARRYING], [1, 5, 7, 2], VOCAB)


def test_a_generation_without_its_prompt_is_refused() -> None:
    with pytest.raises(PrefixError, match="without prompt_token_ids"):
        earlier_tokens([USER, {**PLAIN, "generation_token_ids": [6]}], None, VOCAB)


def test_a_required_prefix_without_any_assistant_turn_is_refused() -> None:
    with pytest.raises(PrefixError, match="assistant message"):
        earlier_tokens([USER], [1, 2], VOCAB)


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**40, True, "1", 1.5, None])
def test_what_is_no_token_id_is_refused(bad: object) -> None:
    with pytest.raises(PrefixError, match="no token id"):
        earlier_tokens([USER, PLAIN], [1, bad], VOCAB)
    with pytest.raises(PrefixError, match="no token id"):
        earlier_tokens([USER, {**CARRYING, "generation_token_ids": [bad]}], None, VOCAB)


@pytest.mark.parametrize("bad", ["12", {"a": 1}, 7])
def test_what_is_no_list_is_refused(bad: object) -> None:
    with pytest.raises(PrefixError, match="must be a list"):
        earlier_tokens([USER, PLAIN], bad, VOCAB)


# --- whose they are ---------------------------------------------------------------------------------------------------

STYLE = CLOSING_STYLES[0]
TEXTS = TokenTexts(frozenset(STYLE.eos), frozenset((*STYLE.eos, *STYLE.special)))
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Japan?"},
    {"role": "assistant", "content": "Tokyo."},
]


def changed(turn: int, content: str) -> list[dict[str, str]]:
    return [{**message, "content": content} if i == turn else message for i, message in enumerate(CHAT)]


def mismatch(model_messages: list[dict[str, str]], messages: list[dict[str, str]]) -> str | None:
    model_text = decode(STYLE, render(STYLE, model_messages, generation_prompt=False))
    skeleton = decode(STYLE, render(STYLE, without_words(messages), generation_prompt=True))
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    return conversation_mismatch(model_text, skeleton, said, TEXTS)


def test_the_same_conversation_fits() -> None:
    assert mismatch(CHAT, CHAT) is None


@pytest.mark.parametrize("turn", range(len(CHAT)))
def test_a_change_in_any_message_is_another_conversation(turn: int) -> None:
    assert mismatch(changed(turn, "Something else."), CHAT)


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_a_shortened_message_is_another_conversation(turn: int) -> None:
    assert mismatch(CHAT, changed(turn, CHAT[turn]["content"][:-2]))


def test_missing_and_additional_turns_are_another_conversation() -> None:
    assert mismatch(CHAT, CHAT[:3])
    assert mismatch(CHAT[:3], CHAT)
    assert mismatch(CHAT, [CHAT[0], CHAT[3], CHAT[4]])


def test_reasoning_that_the_messages_no_longer_have_is_the_models_own() -> None:
    thinking = changed(4, "<think>\nIslands...\n</think>\n\nTokyo.")
    assert mismatch(thinking, CHAT) is None


def test_whitespace_and_special_tokens_inside_of_a_turn_do_not_matter() -> None:
    assert mismatch(changed(2, "\n Pa\u0020ris<|im_start|>.\n"), CHAT) is None


def test_a_turn_that_is_no_text_is_not_compared() -> None:
    model_text = decode(STYLE, render(STYLE, CHAT[:3], generation_prompt=False))
    skeleton = decode(STYLE, render(STYLE, without_words(CHAT[:3]), generation_prompt=True))
    assert conversation_mismatch(model_text, skeleton, [None], TEXTS) is None
    assert conversation_mismatch(model_text, skeleton, ["broken \ufffd"], TEXTS) is None
    assert conversation_mismatch(model_text, skeleton, ["Lyon"], TEXTS)


def test_tool_calls_are_the_models_own() -> None:
    """The model wrote its call with odd spacing, key order and escapes; the template would write it differently."""
    odd_call = '<tool_call>\n{"arguments":{"city" :"Par\\u0069s"},"name":"weather"}\n</tool_call>'
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    model_text = decode(STYLE, render(STYLE, messages[:1], generation_prompt=True) + encode(STYLE, odd_call))
    skeleton = decode(STYLE, render(STYLE, without_words(messages), generation_prompt=True))
    assert conversation_mismatch(model_text, skeleton, [None], TEXTS) is None
