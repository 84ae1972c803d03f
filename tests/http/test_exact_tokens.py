"""Chats over several turns keep the exact tokens, whatever the text says; chat and tokenize agree."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from tests.http.chats import USER, WEATHER_TOOL, Streamed, all_ids, ask, post, prompt_ids
from tests.tiny_tokenizer import EOS_TOKEN_IDS

CREATIVE = {"temperature": 1.0, "max_tokens": 8}
MORE = {"role": "user", "content": "and then?"}
TOOL_RESULT = {"role": "tool", "tool_call_id": "1", "content": "4"}


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def tokenized(base_url: str, **body: Any) -> httpx.Response:
    return post(base_url.removesuffix("/v1") + "/tokenize", body)


def test_messages_sent_back_as_they_came_keep_their_tokens(client: openai.OpenAI, served: Any) -> None:
    """A client that knows nothing of tokens gets exact histories: random bytes, cut-short turns, tool results."""
    messages: list[Any] = [USER]
    earlier: list[int] = []
    for turn in range(5):
        answer = ask(client, served.id, messages, **CREATIVE, seed=turn)
        assert prompt_ids(answer)[: len(earlier)] == earlier
        earlier = all_ids(answer)
        messages += [
            answer.choices[0].message,
            MORE if turn % 2 else {"role": "tool", "tool_call_id": "1", "content": "4"},
        ]


def test_streamed_tokens_are_kept_by_naming_them(
    client: openai.OpenAI, served: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    streamed, prompt = Streamed(), None
    for chunk in client.chat.completions.create(model=served.id, messages=[USER], stream=True, **CREATIVE):
        prompt = prompt or getattr(chunk, "prompt_token_ids", None)
        for choice in chunk.choices:
            streamed.add(choice)
    assert prompt is not None
    earlier = prompt + streamed.token_ids
    messages = [USER, {"role": "assistant", "content": streamed.text}, MORE]
    answer = ask(client, served.id, messages, **CREATIVE, required_prefix_token_ids=earlier)
    assert prompt_ids(answer)[: len(earlier)] == earlier
    added = prompt_ids(answer)[len(earlier) :]
    closing = "" if earlier[-1] in EOS_TOKEN_IDS else "<|im_end|>"
    expected = f"{closing}\n<|im_start|>user\n{MORE['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(added) == expected
    assert answer.refitd["prefix"] == {"tokens": len(earlier), "mismatch": None}


@pytest.mark.parametrize("ending", ["<|im_end|>", "<|endoftext|>", ""])
@pytest.mark.parametrize("split", [["daemon"], ["d", "aemon"], ["da", "em", "on"], list("daemon")])
def test_every_split_of_a_word_stays_as_the_model_made_it(
    client: openai.OpenAI, served: Any, tokenizer: PreTrainedTokenizerFast, split: list[str], ending: str
) -> None:
    pieces = [*split, *([ending] if ending else [])]
    earlier = rendered(tokenizer, [USER]) + [token for piece in pieces for token in tokenizer.encode(piece)]
    messages = [USER, {"role": "assistant", "content": "daemon"}, MORE]
    answer = ask(client, served.id, messages, max_tokens=1, required_prefix_token_ids=earlier)
    assert prompt_ids(answer)[: len(earlier)] == earlier
    assert tokenizer.decode(prompt_ids(answer)).count("daemon") == tokenizer.decode(earlier).count("daemon")


def test_reasoning_stays_in_every_turn_though_the_template_strips_it(
    client: openai.OpenAI, served: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Think, then a user; think, then a tool; think again."""
    messages: list[dict[str, Any]] = [USER]
    prompt = rendered(tokenizer, messages)
    followers = [MORE, TOOL_RESULT, MORE]
    for turn, follower in enumerate(followers):
        said = f"<think>\nthought {turn}\n</think>\n\nanswer {turn}"
        earlier = prompt + tokenizer.encode(said + "<|im_end|>")
        messages += [{"role": "assistant", "content": said}, follower]
        prompt = prompt_ids(ask(client, served.id, messages, max_tokens=1, required_prefix_token_ids=earlier))
        assert prompt[: len(earlier)] == earlier
    text = tokenizer.decode(prompt)
    assert [text.count(f"thought {turn}") for turn in range(3)] == [1, 1, 1]
    assert [text.count(f"answer {turn}") for turn in range(3)] == [1, 1, 1]


def test_tool_calls_keep_the_models_own_writing(
    client: openai.OpenAI, served: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The model calls a tool; the template would write that call differently, the prompt has it as it was made."""
    tools: dict[str, Any] = {
        "tools": [WEATHER_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    asked = (ask(client, served.id, [USER], **tools, max_tokens=150, temperature=1.0, seed=seed) for seed in range(20))
    called = next(answer for answer in asked if answer.choices[0].message.tool_calls)
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "weather"
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    answer = ask(
        client,
        served.id,
        [USER, called.choices[0].message, result],
        tools=[WEATHER_TOOL],
        tool_choice="none",
        max_tokens=1,
    )
    earlier = all_ids(called)
    assert prompt_ids(answer)[: len(earlier)] == earlier
    assert "<tool_response>\nrain\n</tool_response>" in tokenizer.decode(prompt_ids(answer)[len(earlier) :])


def test_odd_spacing_order_and_escapes_of_a_tool_call_stay(
    client: openai.OpenAI, served: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    odd = '<tool_call>\n{"arguments":{"city" :"Par\\u0069s"},  "name":"weather"}\n</tool_call><|im_end|>'
    earlier = rendered(tokenizer, [USER]) + tokenizer.encode(odd)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    answer = ask(client, served.id, messages, max_tokens=1, required_prefix_token_ids=earlier)
    assert prompt_ids(answer)[: len(earlier)] == earlier
    assert tokenizer.decode(prompt_ids(answer)).count("weather") == 1


@pytest.mark.parametrize("given", ["required", "carried"])
def test_chat_and_tokenize_agree(client: openai.OpenAI, served: Any, base_url: str, given: str) -> None:
    first = ask(client, served.id, [USER], **CREATIVE)
    message = first.choices[0].message
    turn: dict[str, Any] = {"role": "assistant", "content": message.content}
    extra: dict[str, Any] = {}
    if given == "required":
        extra["required_prefix_token_ids"] = all_ids(first)
    else:
        turn |= {"prompt_token_ids": prompt_ids(first), "token_ids": first.choices[0].token_ids}
    body = {"model": served.id, "messages": [USER, turn, MORE], **extra}
    chat = post(f"{base_url}/chat/completions", {**body, "max_tokens": 1}).json()
    assert chat["prompt_token_ids"] == tokenized(base_url, **body).json()["tokens"]
    assert chat["prompt_token_ids"][: len(all_ids(first))] == all_ids(first)


def test_the_model_can_go_on_with_its_own_unfinished_turn(client: openai.OpenAI, served: Any) -> None:
    first = ask(client, served.id, [USER], max_tokens=4, temperature=0.0)
    assert first.choices[0].token_ids[-1] not in EOS_TOKEN_IDS
    answer = client.chat.completions.create(
        model=served.id,
        messages=[USER, first.choices[0].message],
        max_tokens=2,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert prompt_ids(answer) == all_ids(first)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "something else"}, {"role": "assistant", "content": "daemon"}, MORE],
        [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "daemon"}, MORE],
        [USER, {"role": "assistant", "content": "another sample"}, MORE],
        [USER, {"role": "assistant", "content": "daemon"}, MORE, {"role": "assistant", "content": "yes"}, MORE],
    ],
)
@pytest.mark.parametrize("path", ["chat", "tokenize"])
def test_the_prefix_of_another_conversation_is_a_conflict(
    base_url: str, served: Any, tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], path: str
) -> None:
    earlier = rendered(tokenizer, [USER]) + tokenizer.encode("daemon<|im_end|>")
    body = {"model": served.id, "messages": messages, "required_prefix_token_ids": earlier}
    url = f"{base_url}/chat/completions" if path == "chat" else base_url.removesuffix("/v1") + "/tokenize"
    answer = post(url, body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "prefix_mismatch")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("bad", [[1, -1], [1, 512], [True], ["1"], "12", {"0": 1}, [1.5]])
def test_a_prefix_that_is_no_ids_is_refused(base_url: str, served: Any, bad: object) -> None:
    messages = [USER, {"role": "assistant", "content": "daemon"}, MORE]
    answer = tokenized(base_url, model=served.id, messages=messages, required_prefix_token_ids=bad)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_prefix")


@pytest.mark.parametrize("room", [2, 1, 0, -1])
def test_the_limit_counts_after_the_splice(
    client: openai.OpenAI, served: Any, tokenizer: PreTrainedTokenizerFast, room: int
) -> None:
    """The same text in more tokens: the template's rendering alone would leave plenty of room."""
    context = served.max_model_len
    end = tokenizer.encode("<|im_end|>")
    added = tokenizer.encode(f"\n<|im_start|>user\n{MORE['content']}<|im_end|>\n<|im_start|>assistant\n")
    prompt = rendered(tokenizer, [USER])
    letters = context - room - len(prompt) - len(end) - len(added)
    earlier = prompt + tokenizer.encode("a") * letters + end
    messages = [USER, {"role": "assistant", "content": "a" * letters}, MORE]
    options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "required_prefix_token_ids": earlier}
    if room <= 0:
        with pytest.raises(openai.BadRequestError, match=f"context length of {context}"):
            ask(client, served.id, messages, **options)
        return
    answer = ask(client, served.id, messages, **options, min_tokens=5)
    assert len(prompt_ids(answer)) == context - room
    assert len(answer.choices[0].token_ids) == room
    assert (answer.refitd["max_tokens"], answer.refitd["clamped"]) == (room, True)
