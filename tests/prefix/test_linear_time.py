"""Conversations of forty thousand turns: whatever looked at all turns once for each of them would take hours."""

from __future__ import annotations

from refitd.prefix import TokenTexts, conversation_mismatch, earlier_tokens, splice, without_words

TURNS = 40_000
EOS = 2
TEXTS = TokenTexts(eos=frozenset({"<e>"}), special=frozenset({"<e>", "<s>"}))


def test_a_splice_of_turns_whose_reasoning_is_stripped() -> None:
    """The slowest way: the template renders every earlier turn otherwise, so turns are counted off."""
    model = [11, 12, 90, 91, 92, 50, EOS] * TURNS
    template_prefix = [11, 12, 50, EOS] * (TURNS - 1) + [11, 12, 90, 50, EOS]
    template = [11, 12, 50, EOS] * TURNS + [20, EOS, 40]
    assert splice(model, template_prefix, template, {EOS}) == [*model, 20, EOS, 40]


def test_a_comparison_of_conversations() -> None:
    """All that stands between the turns, and every turn's words."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "word"}] * TURNS
    written = "".join(f"<s>{message['role']}:{message['content']}<e>" for message in messages)
    skeleton = "".join(f"<s>{message['role']}:{message['content']}<e>" for message in without_words(messages))
    said = ["word"] * TURNS
    assert conversation_mismatch(written, f"{skeleton}<s>assistant:", said, TEXTS) is None
    said[-1] = "another"
    mismatch = conversation_mismatch(written, f"{skeleton}<s>assistant:", said, TEXTS)
    assert mismatch == f"assistant turn {TURNS} says something else"


def test_the_tokens_of_a_conversation_that_carries_all_of_them() -> None:
    """Only the latest turn's are read."""
    ids = list(range(500)) * 20
    carrying = {"role": "assistant", "content": "word", "prompt_token_ids": ids, "generation_token_ids": [5]}
    messages = [{"role": "user", "content": "q"}, carrying] * TURNS
    found = earlier_tokens(messages, None, 512)
    assert found is not None
    assert (found.turn, len(found.token_ids)) == (2 * TURNS - 1, len(ids) + 1)
