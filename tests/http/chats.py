"""Short ways to ask, and to read ids out of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from openai.types.chat import ChatCompletion

USER = {"role": "user", "content": "tell me of the daemon"}
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Lyon"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def ask(client: openai.OpenAI, model: str, messages: Sequence[Any], **options: Any) -> ChatCompletion:
    """Names of ours and of vLLM's travel in `extra_body`."""
    extra = {name: options.pop(name) for name in list(options) if name in EXTRA}
    answer: ChatCompletion = client.chat.completions.create(
        model=model, messages=list(messages), **options, extra_body=extra
    )
    return answer


EXTRA = frozenset({"required_prefix_token_ids", "ignore_eos", "min_tokens", "min_version", "continue_final_message"})


def post(url: str, body: object, key: str = "none") -> httpx.Response:
    """Plain HTTP, for what a client library would not send; as patient as a busy machine asks for."""
    return httpx.post(url, json=body, timeout=120.0, headers={"authorization": f"Bearer {key}"})


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=120.0)


def prompt_ids(answer: Any) -> list[int]:
    ids: list[int] = answer.prompt_token_ids
    return ids


def all_ids(answer: ChatCompletion, choice: int = 0) -> list[int]:
    """Prompt and generation."""
    return prompt_ids(answer) + answer.choices[choice].token_ids


@dataclass
class Streamed:
    """One choice of a stream, put together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def add(self, choice: Any) -> None:
        self.text += choice.delta.content or ""
        self.token_ids += getattr(choice, "token_ids", None) or []
        self.logprobs += [entry.logprob for entry in (choice.logprobs.content if choice.logprobs else [])]
        for version, count in getattr(choice, "weights_versions", None) or []:
            self.versions += [version] * count
        self.finish_reason = choice.finish_reason or self.finish_reason
