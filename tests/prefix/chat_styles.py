"""Four ways in which models write conversations, as real jinja templates, with a byte-level BPE tokenizer to match.

Each style also says by hand what its template adds after an assistant turn, so that tests need not ask the splice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Messages = Sequence[dict[str, object]]

THINKING_CHATML = """\
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- elif m.role != 'assistant' -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- else -%}
{%- set said = m.content or '' -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\n') -%}
{%- else -%}{%- set thought = '' -%}{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > last.user and (loop.last or thought) -%}
{{- '<think>\n' + thought + '\n</think>\n\n' -}}
{%- endif -%}
{{- said -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- for m in messages -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content or '') | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"""

GEMMA = """\
{{- '<bos>' -}}
{%- for m in messages -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' -}}
{{- (m.content or '') | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}"""

# Closes an assistant turn only once something follows.
LATE_EOS = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- m.content + ('' if loop.last else '</s>') -}}
{%- else -%}
{{- '[INST]' + m.role + ': ' + m.content + '[/INST]' -}}
{%- endif -%}
{%- endfor -%}"""

BARE = """\
{%- for m in messages -%}{{- m.role + ': ' + m.content + '\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"""

CORPUS = [
    "the quick brown fox jumps over the lazy dog. Paris is the capital of France, isn't it? Yes!\n\n",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "<think>\nhm, let me see\n</think>\n\n",
    "user assistant system model tool: 12 24 48 96 3.1415 naïve café 東京 🦊 \u0020\u0020\u0020 indentation\n",
]


@dataclass(frozen=True)
class Style:
    name: str
    template: str
    eos: tuple[str, ...]
    special: tuple[str, ...]
    write_turn: Callable[[str, str], str]
    write_opening: str
    roles: tuple[str, ...] = ("user",)
    separator: str = ""
    thinks: bool = field(default=False)

    def continuation(self, messages: Messages) -> str:
        """What the template writes after the terminator of a turn that `messages` follow."""
        turns = "".join(self.write_turn(str(m["role"]), str(m["content"])) for m in messages)
        return self.separator + turns + self.write_opening


def _chatml_turn(role: str, content: str) -> str:
    if role == "tool":
        return f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


CLOSING_STYLES = [
    Style(
        "chatml",
        THINKING_CHATML,
        ("<|im_end|>", "<|endoftext|>"),
        ("<|im_start|>",),
        _chatml_turn,
        "<|im_start|>assistant\n",
        roles=("user", "tool"),
        separator="\n",
        thinks=True,
    ),
    Style(
        "llama3",
        LLAMA3,
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        lambda role, content: f"<|start_header_id|>{role}<|end_header_id|>\n\n{content.strip()}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        roles=("user", "tool"),
    ),
    Style(
        "gemma",
        GEMMA,
        ("<end_of_turn>", "<eos>"),
        ("<bos>", "<start_of_turn>"),
        lambda role, content: f"<start_of_turn>{role}\n{content.strip()}<end_of_turn>\n",
        "<start_of_turn>model\n",
        separator="\n",
    ),
    Style(
        "late-eos",
        LATE_EOS,
        ("</s>",),
        ("[INST]", "[/INST]"),
        lambda role, content: f"[INST]{role}: {content}[/INST]",
        "",
    ),
]

UNCLOSED_STYLE = Style("bare", BARE, ("</s>",), (), lambda role, content: f"{role}: {content}\n", "assistant:")


@functools.cache
def tokenizer_of(style: Style) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 ids or so whose special tokens are the style's; its `eos_token` is the last of them."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (*style.special, *style.eos)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=style.eos[-1],
        chat_template=style.template,
        clean_up_tokenization_spaces=False,
    )


def eos_token_ids(style: Style) -> frozenset[int]:
    return frozenset(tokenizer_of(style).convert_tokens_to_ids(list(style.eos)))


def render(style: Style, messages: Messages, *, generation_prompt: bool) -> list[int]:
    ids = tokenizer_of(style).apply_chat_template(
        list(messages), add_generation_prompt=generation_prompt, tokenize=True, return_dict=False
    )
    assert isinstance(ids, list)
    return ids


def encode(style: Style, text: str) -> list[int]:
    ids: list[int] = tokenizer_of(style).encode(text, add_special_tokens=False)
    return ids


def decode(style: Style, token_ids: Sequence[int]) -> str:
    return tokenizer_of(style).decode(list(token_ids), skip_special_tokens=False)
