"""The rule of the splice over random conversations, random tokenisations and real templates."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.prefix import TokenTexts, TurnNotClosedError, closes_turns, conversation_mismatch, splice, without_words
from tests.prefix.chat_styles import (
    CLOSING_STYLES,
    UNCLOSED_STYLE,
    Style,
    decode,
    encode,
    eos_token_ids,
    render,
    tokenizer_of,
)

WORDS = st.text(alphabet=st.sampled_from(list('abe ,.!\n"{}:12éü東🦊')), max_size=24)
ENDINGS = st.sampled_from(["template's eos", "another eos", "cut short"])


@st.composite
def any_split(draw: st.DrawFn, style: Style, text: str) -> list[int]:
    """`text` in one of its many tokenisations: cut anywhere, each piece encoded by itself."""
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [token_id for piece in pieces if piece for token_id in encode(style, piece)]


@st.composite
def generation(draw: st.DrawFn, style: Style, text: str) -> list[int]:
    ids = draw(any_split(style, text))
    ending = draw(ENDINGS)
    if ending == "cut short":
        return ids
    eos = style.eos[0] if ending == "template's eos" else style.eos[-1]
    return [*ids, tokenizer_of(style).convert_tokens_to_ids(eos)]


def said_text(draw: st.DrawFn, style: Style, turn: int) -> str:
    """Each turn holds a mark of its own, so that it can be counted."""
    thought = f"<think>\n{draw(WORDS)}\n</think>\n\n" if style.thinks and draw(st.booleans()) else ""
    return f"{thought}{draw(WORDS)}mark{turn}{draw(WORDS)}"


def follow_ups(draw: st.DrawFn, style: Style) -> list[dict[str, object]]:
    roles = draw(st.lists(st.sampled_from(style.roles), min_size=1, max_size=2))
    return [{"role": role, "content": draw(WORDS)} for role in roles]


def texts_of(style: Style) -> TokenTexts:
    return TokenTexts(frozenset(style.eos), frozenset((*style.eos, *style.special)))


def mismatch(style: Style, model_prefix: Sequence[int], messages: Sequence[dict[str, object]]) -> str | None:
    skeleton = decode(style, render(style, without_words(messages), generation_prompt=True))
    said = [str(message["content"]) for message in messages if message["role"] == "assistant"]
    return conversation_mismatch(decode(style, model_prefix), skeleton, said, texts_of(style))


@pytest.mark.parametrize("style", CLOSING_STYLES, ids=lambda style: style.name)
@settings(max_examples=60)
@given(data=st.data())
def test_each_prompt_keeps_the_last_and_adds_what_the_template_adds(style: Style, data: st.DataObject) -> None:
    """Starts with exactly the earlier prompt and generation, has each turn once, ends with what follows by hand."""
    messages: list[dict[str, object]] = [{"role": "user", "content": data.draw(WORDS)}]
    prompt = render(style, messages, generation_prompt=True)
    for turn in range(data.draw(st.integers(1, 4))):
        said = said_text(data.draw, style, turn)
        model_prefix = prompt + data.draw(generation(style, said))
        messages.append({"role": "assistant", "content": said})
        template_prefix = render(style, messages, generation_prompt=False)
        assert mismatch(style, model_prefix, messages) is None
        more = follow_ups(data.draw, style)
        messages += more

        prompt = splice(
            model_prefix, template_prefix, render(style, messages, generation_prompt=True), eos_token_ids(style)
        )

        assert prompt[: len(model_prefix)] == model_prefix
        added = decode(style, prompt[len(model_prefix) :])
        cut_short = model_prefix[-1] not in eos_token_ids(style)
        assert added == (style.eos[0] if cut_short else "") + style.continuation(more)
        whole = decode(style, prompt)
        assert [whole.count(f"mark{earlier}") for earlier in range(turn + 1)] == [1] * (turn + 1)


@settings(max_examples=30)
@given(data=st.data())
def test_a_template_without_terminators_is_always_refused(data: st.DataObject) -> None:
    """Nothing says where a turn ends, so nothing may be guessed."""
    style = UNCLOSED_STYLE
    messages: list[dict[str, object]] = [{"role": "user", "content": data.draw(WORDS)}]
    prompt = render(style, messages, generation_prompt=True)
    said = said_text(data.draw, style, 0)
    messages.append({"role": "assistant", "content": said})
    template_prefix = render(style, messages, generation_prompt=False)
    messages += follow_ups(data.draw, style)
    template = render(style, messages, generation_prompt=True)
    with pytest.raises(TurnNotClosedError):
        splice(prompt + data.draw(generation(style, said)), template_prefix, template, eos_token_ids(style))


@pytest.mark.parametrize("style", [*CLOSING_STYLES, UNCLOSED_STYLE], ids=lambda style: style.name)
def test_the_skeleton_tells_which_templates_close_a_last_turn(style: Style) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    skeleton = decode(style, render(style, without_words(messages), generation_prompt=True))
    assert closes_turns(skeleton, texts_of(style)) == (style.name not in {"late-eos", "bare"})
