"""The task: after a day's name, say the next three days. A verifier decides; nobody shows the model an answer."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ANSWER_LENGTH = 3

# What a word earns that is a day, though not the right one: without it, a model that babbles would find nothing to
# learn.
CREDIT_FOR_ANY_DAY = 0.1


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained here, in which each day is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(DAYS)] * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def token_of_each_day(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Token ids in the order of `DAYS`."""
    return [_only(tokenizer.encode(day)) for day in DAYS]


def _only(token_ids: Sequence[int]) -> int:
    (token_id,) = token_ids
    return token_id


def reward(day: int, answer: Sequence[int], day_tokens: Sequence[int]) -> float:
    """From 0 to 1: the share of right words up to the first mistake, and a little for other words that are days at all.

    `day` counts from Monday = 0; `answer` holds the model's token ids, `day_tokens` the id of each day.
    """
    right = _right_words(day, answer, day_tokens)
    other_days = sum(token in day_tokens for token in answer[right:])
    return (right + CREDIT_FOR_ANY_DAY * other_days) / ANSWER_LENGTH


def _right_words(day: int, answer: Sequence[int], day_tokens: Sequence[int]) -> int:
    for position, token in enumerate(answer):
        if token != day_tokens[(day + 1 + position) % len(day_tokens)]:
            return position
    return len(answer)
