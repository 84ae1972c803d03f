"""Puts the exact tokens of earlier turns into a rendered chat prompt: renders what is compared, checks, splices.

Knows no vLLM: rendering and decoding come in as functions, so chat and tokenize share this one path.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from refitd.prefix import (
    EarlierTokens,
    PrefixError,
    PrefixMismatchError,
    TokenTexts,
    closes_turns,
    conversation_mismatch,
    splice,
    without_words,
)

CARRIED_FIELDS = frozenset(
    {"prompt_token_ids", "generation_token_ids", "token_ids", "generation_log_probs", "logprobs"}
)

Messages = Sequence[Mapping[str, object]]


class Render(Protocol):
    """The chat template's ids for some messages, with the request's own tools and template arguments."""

    def __call__(self, messages: Messages, *, generation_prompt: bool) -> Awaitable[list[int]]: ...


@dataclass(frozen=True)
class Vocabulary:
    """What the splice needs of the tokenizer; `decode` keeps special tokens."""

    decode: Callable[[Sequence[int]], str]
    eos_token_ids: frozenset[int]
    texts: TokenTexts


@dataclass(frozen=True)
class ExactPrompt:
    """`mismatch` says why the prefix seems to be another conversation's; only a lenient request gets such a prompt."""

    token_ids: list[int]
    mismatch: str | None


async def exact_prompt(
    earlier: EarlierTokens,
    messages: Messages,
    template: list[int],
    render: Render,
    vocabulary: Vocabulary,
    *,
    strict: bool,
    continues_turn: bool,
) -> ExactPrompt:
    """`template`, the rendering of all `messages`, with `earlier` in place of the turns it covers.

    `continues_turn`: the last message is left open for the model to go on with. Raises `PrefixError`.
    """
    messages = [_plain(message) for message in messages]
    covered = messages[: earlier.turn + 1]
    skeleton = await _skeleton(covered, render, vocabulary, strict=strict)
    mismatch = skeleton and conversation_mismatch(
        vocabulary.decode(earlier.token_ids), skeleton, _said(covered), vocabulary.texts
    )
    if mismatch and strict:
        raise PrefixMismatchError(f"the prefix is of another conversation: {mismatch}")
    if continues_turn and len(covered) == len(messages):
        return ExactPrompt(_open_turn(earlier, vocabulary.eos_token_ids), mismatch)
    spliced = splice(
        earlier.token_ids,
        await render(covered, generation_prompt=False),
        template,
        vocabulary.eos_token_ids,
        prefix_is_closed=closes_turns(skeleton, vocabulary.texts) if skeleton else None,
    )
    return ExactPrompt(spliced, mismatch)


async def _skeleton(covered: Messages, render: Render, vocabulary: Vocabulary, *, strict: bool) -> str | None:
    """None where the template refuses a conversation without words; strict requests are refused then, too."""
    try:
        return vocabulary.decode(await render(without_words(covered), generation_prompt=True))
    # Templates raise what they like, wrapped in what the renderer likes.
    except Exception as error:
        if strict:
            raise PrefixError(
                "this chat template cannot show whose prefix this is, set http.strict_prefix = false to go without: "
                f"{error}"
            ) from error
        return None


def _open_turn(earlier: EarlierTokens, eos_token_ids: Collection[int]) -> list[int]:
    if earlier.token_ids[-1] in eos_token_ids:
        raise PrefixError("continue_final_message: the model has ended this turn with an EOS")
    return list(earlier.token_ids)


def _plain(message: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in message.items() if name not in CARRIED_FIELDS}


def _said(messages: Messages) -> list[str | None]:
    return [_text(message.get("content")) for message in messages if message.get("role") == "assistant"]


def _text(content: object) -> str | None:
    """None for what is not known as one text: parts are joined by the template in its own way."""
    return content if isinstance(content, str) else None
