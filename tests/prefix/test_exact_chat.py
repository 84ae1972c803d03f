"""The way from messages that carry tokens to one prompt, with real templates and without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from refitd.exact_chat import ExactPrompt, Vocabulary, exact_prompt
from refitd.prefix import EarlierTokens, PrefixError, PrefixMismatchError, TokenTexts, TurnNotClosedError
from tests.prefix.chat_styles import CLOSING_STYLES, UNCLOSED_STYLE, Style, decode, encode, eos_token_ids, render

USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "the quick fox"}
MORE = {"role": "user", "content": "more"}


def prompt_for(
    style: Style,
    earlier: EarlierTokens,
    messages: Sequence[Mapping[str, object]],
    *,
    strict: bool = True,
    continues_turn: bool = False,
) -> ExactPrompt:
    async def rendered(messages: Sequence[Mapping[str, object]], *, generation_prompt: bool) -> list[int]:
        return render(style, [dict(message) for message in messages], generation_prompt=generation_prompt)

    special = frozenset((*style.eos, *style.special))
    vocabulary = Vocabulary(
        lambda ids: decode(style, ids), eos_token_ids(style), TokenTexts(frozenset(style.eos), special)
    )
    template = render(style, [dict(message) for message in messages], generation_prompt=True)
    return asyncio.run(
        exact_prompt(earlier, messages, template, rendered, vocabulary, strict=strict, continues_turn=continues_turn)
    )


def letters(style: Style, text: str, *, ending: str) -> list[int]:
    """Every character by itself: a tokenisation that no template would write."""
    return [token_id for letter in text for token_id in encode(style, letter)] + encode(style, ending)


@pytest.mark.parametrize("style", CLOSING_STYLES, ids=lambda style: style.name)
def test_earlier_tokens_are_kept(style: Style) -> None:
    start = render(style, [USER], generation_prompt=True)
    earlier = EarlierTokens(1, start + letters(style, "the quick fox", ending=style.eos[-1]))
    exact = prompt_for(style, earlier, [USER, SAID, MORE])
    assert exact.token_ids[: len(earlier.token_ids)] == earlier.token_ids
    assert decode(style, exact.token_ids[len(earlier.token_ids) :]) == style.continuation([MORE])
    assert exact.mismatch is None


def test_tokens_of_an_earlier_turn_are_kept_when_later_turns_have_none() -> None:
    style = CLOSING_STYLES[0]
    earlier = EarlierTokens(
        1, render(style, [USER], generation_prompt=True) + letters(style, "the quick fox", ending="")
    )
    exact = prompt_for(style, earlier, [USER, SAID, MORE, SAID, MORE])
    assert exact.token_ids[: len(earlier.token_ids)] == earlier.token_ids
    added = decode(style, exact.token_ids[len(earlier.token_ids) :])
    assert added == style.eos[0] + style.continuation([MORE, SAID, MORE])


def test_ids_carried_by_messages_do_not_reach_the_template() -> None:
    style = CLOSING_STYLES[0]
    carrying = {**SAID, "prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    earlier = EarlierTokens(1, render(style, [USER, SAID], generation_prompt=False)[:-1])
    with_ids = prompt_for(style, earlier, [USER, carrying, MORE])
    assert with_ids == prompt_for(style, earlier, [USER, SAID, MORE])


def test_another_conversation_is_refused_or_reported() -> None:
    style = CLOSING_STYLES[0]
    other = [{"role": "user", "content": "bye"}]
    earlier = EarlierTokens(
        1, render(style, other, generation_prompt=True) + letters(style, "quick", ending=style.eos[0])
    )
    with pytest.raises(PrefixMismatchError, match="before the first assistant turn"):
        prompt_for(style, earlier, [USER, SAID, MORE])
    lenient = prompt_for(style, earlier, [USER, SAID, MORE], strict=False)
    assert lenient.mismatch == "it differs from the messages before the first assistant turn"
    assert lenient.token_ids[: len(earlier.token_ids)] == earlier.token_ids


@pytest.mark.parametrize("strict", [True, False])
def test_a_template_that_closes_no_turn_is_refused(strict: bool) -> None:
    style = UNCLOSED_STYLE
    earlier = EarlierTokens(1, render(style, [USER], generation_prompt=True) + encode(style, "the quick fox"))
    with pytest.raises(TurnNotClosedError):
        prompt_for(style, earlier, [USER, SAID, MORE], strict=strict)


def test_a_template_that_cannot_be_rendered_without_words_is_unchecked_only_when_lenient() -> None:
    """Some refuse a tool's answer when no call went before."""
    template = CLOSING_STYLES[0].template.replace(
        "{%- if m.role == 'tool' -%}",
        "{%- if m.role == 'tool' -%}"
        "{%- if not messages[loop.index0 - 1].tool_calls -%}{{- raise_exception('no call') -}}{%- endif -%}",
    )
    chatml = CLOSING_STYLES[0]
    style = Style(
        "picky", template, chatml.eos, chatml.special, chatml.write_turn, chatml.write_opening, separator="\n"
    )
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [USER, {**SAID, "tool_calls": [call]}, {"role": "tool", "content": "rain"}, SAID, MORE]
    made = render(style, messages[:3], generation_prompt=True) + letters(style, "the quick fox", ending=style.eos[0])
    with pytest.raises(PrefixError, match="no call"):
        prompt_for(style, EarlierTokens(3, made), messages)
    lenient = prompt_for(style, EarlierTokens(3, made), messages, strict=False)
    assert lenient.token_ids == made + encode(style, chatml.continuation([MORE]))


def test_an_unfinished_turn_is_gone_on_with_as_it_is() -> None:
    style = CLOSING_STYLES[0]
    start = render(style, [USER], generation_prompt=True)
    unfinished = EarlierTokens(1, start + letters(style, "the quick", ending=""))
    said = {"role": "assistant", "content": "the quick"}
    assert prompt_for(style, unfinished, [USER, said], continues_turn=True).token_ids == unfinished.token_ids
    finished = EarlierTokens(1, start + letters(style, "the quick", ending=style.eos[0]))
    with pytest.raises(PrefixError, match="ended this turn"):
        prompt_for(style, finished, [USER, said], continues_turn=True)
