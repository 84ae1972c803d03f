"""A small real BPE tokenizer whose ids fit the tiny models' vocabulary of 512."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.prefix.chat_styles import THINKING_CHATML

VOCABULARY = 512
SPECIAL_TOKENS = ["<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The turn's end is none of the tokenizer's own `eos_token`: the model's generation config names both.
EOS_TOKEN_IDS = [SPECIAL_TOKENS.index("<|endoftext|>"), SPECIAL_TOKENS.index("<|im_end|>")]
TEXT = [
    "The daemon owns the engine and the trainer pushes its weights.",
    "Reward rises when the policy says what the verifier wants to hear.",
    'def step(table, state, event): return table[state, event]  # {"name": "add", "arguments": {"a": 1}}',
    "user assistant system tool think 0 1 2 3 4 5 6 7 8 9",
]


def build_tokenizer(path: Path, words: Sequence[str] = ()) -> None:
    """Writes tokenizer files, with a chat template, into the model folder `path`; `words` are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(words),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|endoftext|>", chat_template=THINKING_CHATML
    )
    fast.save_pretrained(path)
