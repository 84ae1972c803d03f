"""The endpoint's own settings as OpenAI clients see them: parsers, lenient prefixes, key, limit of bodies.

Its model makes each token from the one before, so a script of tokens makes it think, call a tool and answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from refit_trainer import Daemon
from tests.daemon_process import DaemonProcess, running_daemon
from tests.http.chats import USER, WEATHER_TOOL, all_ids, ask, post, prompt_ids
from tests.markov import make_script
from tests.tiny_tokenizer import EOS_TOKEN_IDS, build_tokenizer
from tests.worker.models import build_model

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WORDS = ["<think>", "</think>", "hmm", "sunny", CALL]
THINK_AND_CALL = ["<think>", "hmm", "</think>", CALL, "<|im_end|>"]
THINK_AND_ANSWER = ["<think>", "hmm", "</think>", "sunny", "<|im_end|>"]
KEY = "let-me-in"
MAX_BODY_BYTES = 50_000
TOOLS: dict[str, Any] = {"tools": [{**WEATHER_TOOL, "function": {**WEATHER_TOOL["function"], "strict": False}}]}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def talker(short_directory: Path) -> Iterator[tuple[DaemonProcess, PreTrainedTokenizerFast]]:
    """A daemon of this module's own: its tokenizer has a token for each word of the script."""
    path = short_directory / "talker"
    build_model("qwen3", path, seed=0, eos_token_id=EOS_TOKEN_IDS)
    build_tokenizer(path, WORDS)
    settings = ("tool_call_parser=hermes", "reasoning_parser=deepseek_r1", "strict_prefix=false")
    access = (f"api_key={KEY}", f"max_body_bytes={MAX_BODY_BYTES}")
    http = [f"http.{setting}" for setting in ("enabled=true", *settings, *access)]
    with running_daemon(path, short_directory / "talk", *http) as process:
        yield process, AutoTokenizer.from_pretrained(path)


@pytest.fixture
def daemon(talker: tuple[DaemonProcess, PreTrainedTokenizerFast]) -> Iterator[Daemon]:
    with talker[0].connect() as connected:
        yield connected


@pytest.fixture
def tokenizer(talker: tuple[DaemonProcess, PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return talker[1]


@pytest.fixture
def url(daemon: Daemon) -> str:
    url = daemon.status().http_url
    assert url is not None
    return url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as connected:
        yield connected


@pytest.fixture
def name(daemon: Daemon) -> str:
    return daemon.status().model.name


class Teacher:
    """Makes the engine say something, whatever it is asked."""

    def __init__(self, daemon: Daemon, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self._daemon, self._model, self._tokenizer = daemon, model, tokenizer
        self.start = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)[-1]

    def teach(self, words: list[str]) -> list[int]:
        said = self._tokenizer.convert_tokens_to_ids(words)
        make_script(self._model, [self.start, *said])
        self._daemon.refit(self._model)
        return said


@pytest.fixture
def teacher(daemon: Daemon, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Teacher:
    return Teacher(daemon, model, tokenizer)


def test_a_conversation_with_thoughts_and_tools(client: openai.OpenAI, name: str, teacher: Teacher) -> None:
    """Thoughts, a call, its result, an answer, each parsed; the prompts keep every token of the turns before."""
    said = teacher.teach(THINK_AND_CALL)
    called = ask(client, name, [USER], **TOOLS, **GREEDY)
    message = called.choices[0].message
    assert (called.choices[0].finish_reason, message.reasoning) == ("tool_calls", "hmm")
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    assert called.choices[0].token_ids == said
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    answered_ids = teacher.teach(THINK_AND_ANSWER)
    answered = ask(client, name, [USER, message, result], **TOOLS, **GREEDY)
    assert (answered.choices[0].message.content, answered.choices[0].message.reasoning) == ("sunny", "hmm")
    assert answered.choices[0].token_ids == answered_ids
    assert prompt_ids(answered)[: len(all_ids(called))] == all_ids(called)
    more = ask(client, name, [USER, message, result, answered.choices[0].message, USER], **TOOLS, **GREEDY)
    assert prompt_ids(more)[: len(all_ids(answered))] == all_ids(answered)
    assert more.refitd["prefix"]["mismatch"] is None


def test_a_stream_brings_thoughts_and_calls_apart(client: openai.OpenAI, name: str, teacher: Teacher) -> None:
    """Reasoning, then a call whose arguments add up; all ids with their version, and none twice."""
    said = teacher.teach(THINK_AND_CALL)
    stream = client.chat.completions.create(model=name, messages=[USER], stream=True, **TOOLS, **GREEDY)
    assert _streamed(list(stream)) == ("hmm", "weather", '{"city": "Paris"}', "tool_calls", said)


def test_the_async_client_gets_the_same(url: str, name: str, teacher: Teacher) -> None:
    """Several at once, streaming and not."""
    said = teacher.teach(THINK_AND_CALL)

    async def both() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            create = client.chat.completions.create
            whole = create(model=name, messages=[USER], **TOOLS, **GREEDY)
            stream = await create(model=name, messages=[USER], stream=True, **TOOLS, **GREEDY)
            return await whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(both())
    assert whole.choices[0].message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    thought, *rest = _streamed(chunks)
    # vLLM's parser keeps the marker where it comes in one delta with the words, as deltas that had to wait do.
    assert thought.removeprefix("<think>") == "hmm"
    assert rest == ["weather", '{"city": "Paris"}', "tool_calls", said]


def _streamed(chunks: list[Any]) -> tuple[str, str, str, str, list[int]]:
    choices = [choice for chunk in chunks for choice in chunk.choices]
    calls = [call.function for choice in choices for call in choice.delta.tool_calls or []]
    return (
        "".join(getattr(choice.delta, "reasoning", None) or "" for choice in choices),
        "".join(call.name or "" for call in calls),
        "".join(call.arguments or "" for call in calls),
        next(choice.finish_reason for choice in reversed(choices) if choice.finish_reason),
        [token for choice in choices for token in getattr(choice, "token_ids", None) or []],
    )


@pytest.mark.parametrize("path", ["chat", "tokenize"])
def test_a_lenient_endpoint_keeps_a_strange_prefix_and_says_so(
    client: openai.OpenAI, url: str, name: str, tokenizer: PreTrainedTokenizerFast, path: str
) -> None:
    """Where a strict one answers 409: what the client wanted kept is kept, the answer names the difference."""
    other = [{"role": "user", "content": "something else"}]
    earlier = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    earlier += tokenizer.encode("sunny<|im_end|>", add_special_tokens=False)
    messages = [*other, {"role": "assistant", "content": "sunny"}, USER]
    if path == "chat":
        answer = ask(client, name, messages, max_tokens=1, required_prefix_token_ids=earlier)
        prompt, report = prompt_ids(answer), answer.refitd
    else:
        body = {"model": name, "messages": messages, "required_prefix_token_ids": earlier}
        answered = post(url.removesuffix("/v1") + "/tokenize", body, KEY).json()
        prompt, report = answered["tokens"], answered["refitd"]
    assert prompt[: len(earlier)] == earlier
    assert report["prefix"]["tokens"] == len(earlier)
    assert report["prefix"]["mismatch"]


def test_a_picture_for_a_model_of_texts_is_refused(url: str, name: str) -> None:
    """By a status and words of its own; also with earlier tokens."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    for more in ({}, {"required_prefix_token_ids": [5, 6]}):
        body = {"model": name, "messages": [{"role": "user", "content": [picture]}], **more}
        answer = post(f"{url}/chat/completions", body, KEY)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


def test_only_who_has_the_key_is_served(url: str, name: str) -> None:
    """Another one, or none, is an authentication error to the client library."""
    for key in ("something-else", "let-me-i", KEY.upper()):
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()
            with pytest.raises(openai.AuthenticationError):
                ask(stranger, name, [USER], max_tokens=1)


def test_a_body_over_the_limit_is_refused(client: openai.OpenAI, name: str) -> None:
    """Under it the engine is asked, which finds the conversation too long."""
    for size, status in ((MAX_BODY_BYTES, 413), (MAX_BODY_BYTES // 2, 400)):
        with pytest.raises(openai.APIStatusError) as refused:
            ask(client, name, [{"role": "user", "content": "x" * size}], max_tokens=1)
        assert refused.value.status_code == status
