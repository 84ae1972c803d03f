"""Keeps the exact tokens of earlier turns in a chat prompt: which they are, whose they are, how they are spliced in.

Nothing here renders, tokenises or samples. A chat template writes an earlier assistant turn from its text, and text has
many tokenisations; the splice puts back the ids that the model really produced and goes on with what the template adds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from refit_protocol.errors import ErrorCode, ProtocolError

# Stands for the words of an assistant turn when a conversation is rendered without them; see `conversation_mismatch`.
PROBE = "Qz7refitd7zQ"

# A turn is known by the tokens that open it: the marker and the role.
_OPENING_TOKENS = 2

_UNDECODABLE = "\ufffd"


class PrefixError(ProtocolError):
    """The earlier tokens cannot be kept; `kind` says more closely why."""

    kind = "invalid_prefix"

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INVALID_PROMPT, message)


class PrefixMismatchError(PrefixError):
    """The prefix belongs to another conversation."""

    kind = "prefix_mismatch"


class TurnNotClosedError(PrefixError):
    """The template does not mark the end of the turn, so nothing says where it stops and the next one starts."""

    kind = "turn_not_closed"


class RenderingsDisagreeError(PrefixError):
    """The template writes the same earlier turns so differently that the end of the turn cannot be found."""

    kind = "renderings_disagree"


@dataclass(frozen=True)
class EarlierTokens:
    """`token_ids` is a prompt and what the model generated for it, which is message number `turn`."""

    turn: int
    token_ids: list[int]


def splice(
    model_prefix: Sequence[int],
    template_prefix: Sequence[int],
    template: Sequence[int],
    eos_token_ids: Collection[int],
    *,
    prefix_is_closed: bool | None = None,
) -> list[int]:
    """The prompt that starts with exactly `model_prefix` and goes on with what the template adds after that turn.

    `model_prefix` is an earlier prompt plus generation as the engine had them, ended by an EOS or cut short;
    `template_prefix` is the template's rendering of the same messages, up to and including the turn generated;
    `template` is its rendering of all messages. A turn that was cut short is closed with the template's own terminator.
    `prefix_is_closed` says whether `template_prefix` ends that turn with a terminator, where the caller knows.
    Time and memory are linear in the lengths. Raises `PrefixError`.
    """
    if not model_prefix:
        return list(template)
    if not template_prefix or model_prefix[0] != template_prefix[0]:
        raise PrefixMismatchError("the prefix and the rendered messages differ from the first token on")
    terminators = frozenset(eos_token_ids)
    if not prefix_is_closed and _continues_with_terminator(template_prefix, template, terminators):
        boundary = len(template_prefix)
    else:
        turn_end = _last_terminator(template_prefix if prefix_is_closed is not False else (), terminators)
        boundary = _same_end(template_prefix, turn_end, template, terminators)
    tail_start = boundary + 1 if model_prefix[-1] in terminators else boundary
    return [*model_prefix, *template[tail_start:]]


def _continues_with_terminator(prefix: Sequence[int], template: Sequence[int], terminators: frozenset[int]) -> bool:
    """Whether the turn ends right after `prefix`: some templates leave out the terminator of a turn that comes last."""
    if prefix[-1] in terminators or len(template) <= len(prefix):
        return False
    return template[len(prefix)] in terminators and list(template[: len(prefix)]) == list(prefix)


def _last_terminator(token_ids: Sequence[int], terminators: frozenset[int]) -> int:
    ends = _positions(token_ids, terminators)
    if not ends:
        raise TurnNotClosedError(
            "the chat template closes an assistant turn with none of the model's EOS ids "
            f"{sorted(terminators)}: add the id that it does use to generation_config.json"
        )
    return ends[-1]


def _same_end(prefix: Sequence[int], turn_end: int, template: Sequence[int], terminators: frozenset[int]) -> int:
    """The position in `template` of the terminator that stands at `turn_end` in `prefix`."""
    turns, separator = list(prefix[: turn_end + 1]), list(prefix[turn_end + 1 :])
    boundary = turn_end if turns == list(template[: len(turns)]) else _end_by_count(turns, template, terminators)
    if list(template[boundary + 1 :][: len(separator)]) != separator:
        raise RenderingsDisagreeError("the template goes on differently after the turn than when the turn comes last")
    return boundary


def _end_by_count(prefix: Sequence[int], template: Sequence[int], terminators: frozenset[int]) -> int:
    """As many terminators on as `prefix` has, where the turns between them open alike: templates strip or move
    reasoning out of earlier turns, but keep the turns."""
    prefix_ends, template_ends = _positions(prefix, terminators), _positions(template, terminators)
    if len(template_ends) < len(prefix_ends):
        raise RenderingsDisagreeError("the template renders fewer turns when more messages follow")
    template_ends = template_ends[: len(prefix_ends)]
    pairs = zip(_between(prefix, prefix_ends), _between(template, template_ends), strict=True)
    if not all(_open_alike(*turns) for turns in pairs):
        raise RenderingsDisagreeError(
            "the template renders other turns before the last assistant turn when more follow"
        )
    return template_ends[-1]


def _positions(token_ids: Sequence[int], terminators: frozenset[int]) -> list[int]:
    return [position for position, token_id in enumerate(token_ids) if token_id in terminators]


def _between(token_ids: Sequence[int], ends: Sequence[int]) -> Iterator[list[int]]:
    for before, end in pairwise([-1, *ends]):
        yield list(token_ids[before + 1 : end])


def _open_alike(one: list[int], other: list[int]) -> bool:
    shortest = min(len(one), len(other), _OPENING_TOKENS)
    return one == other or (shortest > 0 and one[:shortest] == other[:shortest])


# --- whose tokens they are --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenTexts:
    """How the tokenizer writes its terminators, and all of its special tokens."""

    eos: frozenset[str]
    special: frozenset[str]


def without_words(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The same conversation with `PROBE` in place of everything that the assistant said or called."""
    return [
        {"role": "assistant", "content": PROBE} if message.get("role") == "assistant" else dict(message)
        for message in messages
    ]


def conversation_mismatch(model_text: str, skeleton: str, said: Sequence[str | None], texts: TokenTexts) -> str | None:
    """Why `model_text` is of another conversation than `skeleton`; None where it fits.

    `model_text` is the decoded model prefix with its special tokens; `skeleton` the decoded rendering, with generation
    prompt, of `without_words` of the same messages; `said` the text of each assistant turn, None where it is not known.
    What stands outside of the assistant's turns must be equal; inside them tokenisation, reasoning and tool calls are
    the model's own.
    """
    opening, *between = _outside_of_turns(skeleton, texts)
    if not model_text.startswith(opening):
        return "it differs from the messages before the first assistant turn"
    position = len(opening)
    for turn, follow_up in enumerate(between):
        found = model_text.find(follow_up, position)
        if found < 0:
            return f"it lacks what stands between assistant turns {turn + 1} and {turn + 2}"
        if problem := _turn_mismatch(model_text[position:found], said[turn], texts):
            return f"assistant turn {turn + 1} {problem}"
        position = found + len(follow_up)
    problem = _turn_mismatch(model_text[position:], said[-1], texts)
    return problem and f"assistant turn {len(said)} {problem}"


def closes_turns(skeleton: str, texts: TokenTexts) -> bool:
    """Whether the template ends the last assistant turn of `skeleton` with a terminator."""
    return _after_terminator(skeleton.rpartition(PROBE)[2], texts) is not None


def _outside_of_turns(skeleton: str, texts: TokenTexts) -> list[str]:
    """What the template writes before each assistant turn, without the empty reasoning that some put into the last."""
    *before_turns, last = skeleton.split(PROBE)
    header = (_after_terminator(last, texts) or "").strip()
    opening, *between = [_up_to(header, text) for text in before_turns]
    return [opening.rstrip(), *((_after_terminator(text, texts) or text).strip() for text in between)]


def _up_to(header: str, text: str) -> str:
    before, found, _ = text.rpartition(header) if header else ("", "", "")
    return before + found or text


def _after_terminator(text: str, texts: TokenTexts) -> str | None:
    ends = [text.index(eos) + len(eos) for eos in texts.eos if eos in text]
    return text[min(ends) :] if ends else None


def _turn_mismatch(turn: str, said: str | None, texts: TokenTexts) -> str | None:
    turn = turn.strip()
    for eos in texts.eos:
        turn = turn.removesuffix(eos)
    if any(eos in turn for eos in texts.eos):
        return "holds an EOS: the prefix has more turns than the messages"
    if said is None or _UNDECODABLE in said:
        return None
    return None if _bare(said, texts) in _bare(turn, texts) else "says something else"


def _bare(text: str, texts: TokenTexts) -> str:
    for special in texts.special:
        text = text.replace(special, "")
    return "".join(text.split())


# --- where requests carry them ----------------------------------------------------------------------------------------


def earlier_tokens(
    messages: Sequence[Mapping[str, object]], required_prefix: object, vocab_size: int
) -> EarlierTokens | None:
    """The tokens to keep: `required_prefix` for the last assistant turn, or what the latest turn that has ids carries.

    A turn carries `prompt_token_ids` with `generation_token_ids` (or `token_ids`). None where there are none, as for an
    empty `required_prefix`. Raises `PrefixError` for ids that are none, for half of a pair, and for a contradiction.
    """
    carried = _carried(messages, vocab_size)
    if required_prefix is None or required_prefix == []:
        return carried
    token_ids = _token_ids(required_prefix, "required_prefix_token_ids", vocab_size)
    turn = _last_assistant(messages)
    if turn is None:
        raise PrefixError("required_prefix_token_ids needs an assistant message whose turn it ends with")
    if carried is not None and carried.turn == turn and carried.token_ids != token_ids:
        raise PrefixError("required_prefix_token_ids and the ids carried by the last assistant message differ")
    return EarlierTokens(turn, token_ids)


def _last_assistant(
    messages: Sequence[Mapping[str, object]], having: Callable[[Mapping[str, object]], object] = bool
) -> int | None:
    turns = (i for i in reversed(range(len(messages))) if messages[i].get("role") == "assistant")
    return next((turn for turn in turns if having(messages[turn])), None)


def _carried(messages: Sequence[Mapping[str, object]], vocab_size: int) -> EarlierTokens | None:
    turn = _last_assistant(messages, having=_generation)
    if turn is None:
        return None
    prompt = messages[turn].get("prompt_token_ids")
    if prompt is None:
        raise PrefixError(f"messages[{turn}] carries the ids of its generation without prompt_token_ids")
    prompt_ids = _token_ids(prompt, f"messages[{turn}].prompt_token_ids", vocab_size)
    return EarlierTokens(turn, prompt_ids + _token_ids(_generation(messages[turn]), f"messages[{turn}]", vocab_size))


def _generation(message: Mapping[str, object]) -> object:
    return message.get("generation_token_ids") or message.get("token_ids")


def _token_ids(value: object, name: str, vocab_size: int) -> list[int]:
    if not isinstance(value, list):
        raise PrefixError(f"{name} must be a list of token ids")
    for token_id in value:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise PrefixError(f"{name} holds {token_id!r}, which is no token id below {vocab_size}")
    return value
