"""What the OpenAI endpoint answers, asked by the `openai` package."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerFast

from refit_trainer import Daemon, Sampling
from tests.canary import unharmed
from tests.http.chats import USER, Streamed, all_ids, ask, get, post, prompt_ids


def test_a_chat_answer_carries_ids_logprobs_and_the_version(
    client: openai.OpenAI, served: Any, tokenizer: PreTrainedTokenizerFast, daemon: Daemon
) -> None:
    """Without being asked for, and the message carries the ids too, so that it can be sent back as it is."""
    answer = ask(client, served.id, [USER], max_tokens=7, ignore_eos=True)
    expected = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    (choice,) = answer.choices
    assert prompt_ids(answer) == expected
    assert len(choice.token_ids) == len(choice.logprobs.content) == answer.usage.completion_tokens == 7
    assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
    version = daemon.status().version
    assert (choice.weights_version, choice.weights_versions) == (version, [[version, 7]])
    assert choice.message.prompt_token_ids + choice.message.generation_token_ids == all_ids(answer)
    assert answer.refitd["logprobs_mode"] == daemon.status().logprobs_mode


def test_a_client_that_wants_no_logprobs_gets_none(client: openai.OpenAI, served: Any) -> None:
    answer = ask(client, served.id, [USER], max_tokens=2, logprobs=False)
    assert answer.choices[0].logprobs is None


def test_greedy_ids_are_those_of_the_daemons_own_protocol(client: openai.OpenAI, served: Any, daemon: Daemon) -> None:
    answer = ask(client, served.id, [USER], max_tokens=8, temperature=0.0, ignore_eos=True)
    sample = daemon.generate_one(prompt_ids(answer), Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert sample.token_ids.tolist() == answer.choices[0].token_ids
    logprobs = [entry.logprob for entry in answer.choices[0].logprobs.content]
    assert logprobs == pytest.approx(sample.logprobs.tolist(), abs=0.05)


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, served: Any, daemon: Daemon) -> None:
    """Each chunk says which weights made its tokens; the first one has the prompt."""
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
    whole = ask(client, served.id, [USER], **options, ignore_eos=True)
    streamed, first = Streamed(), None
    stream = client.chat.completions.create(
        model=served.id, messages=[USER], stream=True, extra_body={"ignore_eos": True}, **options
    )
    for chunk in stream:
        first = first or chunk
        for choice in chunk.choices:
            streamed.add(choice)
    assert first is not None
    assert prompt_ids(first) == prompt_ids(whole)
    assert first.refitd["max_tokens"] == 12
    assert streamed.token_ids == whole.choices[0].token_ids
    assert streamed.text == whole.choices[0].message.content
    assert len(streamed.logprobs) == 12
    assert streamed.versions == [daemon.status().version] * 12
    assert streamed.finish_reason == "length"


def test_an_async_client_streams_several_choices(base_url: str, served: Any, daemon: Daemon) -> None:
    async def collect() -> dict[int, Streamed]:
        choices: dict[int, Streamed] = defaultdict(Streamed)
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=served.id, messages=[USER], n=3, max_tokens=9, stream=True, extra_body={"ignore_eos": True}
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    choices[choice.index].add(choice)
        return choices

    choices = asyncio.run(collect())
    assert sorted(choices) == [0, 1, 2]
    version = daemon.status().version
    assert all(len(choice.token_ids) == 9 and choice.versions == [version] * 9 for choice in choices.values())


def test_async_requests_run_side_by_side(base_url: str, served: Any) -> None:
    async def collect() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            asked = [
                client.chat.completions.create(
                    model=served.id, messages=[USER], max_tokens=length, extra_body={"ignore_eos": True}
                )
                for length in range(1, 9)
            ]
            return list(await asyncio.gather(*asked))

    answers = asyncio.run(collect())
    assert [len(answer.choices[0].token_ids) for answer in answers] == list(range(1, 9))


def test_completions_number_the_samples_of_each_prompt(client: openai.OpenAI, served: Any, daemon: Daemon) -> None:
    prompts = [[5, 60, 7], [9, 400]]
    answer = client.completions.create(
        model=served.id, prompt=prompts, n=2, max_tokens=4, extra_body={"ignore_eos": True}
    )
    version = daemon.status().version
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.prompt_token_ids for choice in answer.choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    for choice in answer.choices:
        assert len(choice.token_ids) == len(choice.logprobs.token_logprobs) == 4
        assert choice.weights_versions == [[version, 4]]


def test_completions_stream(client: openai.OpenAI, served: Any, daemon: Daemon) -> None:
    stream = client.completions.create(
        model=served.id, prompt="the daemon", max_tokens=6, stream=True, extra_body={"ignore_eos": True}
    )
    spans = [span for chunk in stream for choice in chunk.choices for span in choice.weights_versions]
    assert {version for version, _ in spans} == {daemon.status().version}
    assert sum(count for _, count in spans) == 6


def test_tokenize_and_detokenize_are_inverse(base_url: str, tokenizer: PreTrainedTokenizerFast) -> None:
    root = base_url.removesuffix("/v1")
    text = "the daemon owns the engine"
    tokens = post(f"{root}/tokenize", {"prompt": text}).json()["tokens"]
    assert tokens == tokenizer.encode(text)
    assert post(f"{root}/detokenize", {"tokens": tokens}).json() == {"prompt": text}


def test_health_and_metrics_show_both_the_daemon_and_vllm(base_url: str, daemon: Daemon) -> None:
    root = base_url.removesuffix("/v1")
    assert get(f"{root}/health").json() == {"state": "ready", "weights_version": daemon.status().version}
    metrics = get(f"{root}/metrics").text
    assert "vllm:num_requests_running" in metrics
    assert "refitd_http_prefixes" in metrics


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/pause"])
def test_development_routes_are_shut(base_url: str, path: str) -> None:
    assert post(base_url.removesuffix("/v1") + path, {}).status_code == 404


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, 512, 2**40, True, "1", 1.5])
def test_an_id_that_is_none_is_refused_and_harms_nobody(
    base_url: str, served: Any, daemon: Daemon, token: object
) -> None:
    with unharmed(daemon):
        answer = post(f"{base_url}/completions", {"model": served.id, "prompt": [5, token], "max_tokens": 2})
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": ""}),
        ("completions", {"prompt": []}),
        ("completions", {"prompt": [5], "max_tokens": 0}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [USER], "max_tokens": 0}),
        ("chat/completions", {"messages": [USER], "min_version": "new"}),
        ("chat/completions", {"messages": [USER], "use_beam_search": True, "n": 2}),
        ("chat/completions", {"messages": [USER], "structured_outputs": {"grammar": "root ::= root"}}),
        ("completions", {"prompt": [5], "structured_outputs": {"grammar": "root ::= root"}}),
    ],
)
def test_empty_and_impossible_requests_are_refused(
    base_url: str, served: Any, daemon: Daemon, path: str, body: dict[str, Any]
) -> None:
    with unharmed(daemon):
        answer = post(f"{base_url}/{path}", {"model": served.id, "max_tokens": 2, **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


def test_a_version_that_never_comes_is_a_typed_503(base_url: str, served: Any) -> None:
    body = {"model": served.id, "messages": [USER], "min_version": 2**60, "wait_seconds": 0.1}
    answer = post(f"{base_url}/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "version_unavailable")


def test_the_models_directory_is_understood_as_its_name(
    client: openai.OpenAI, base_url: str, served: Any, model_path: Path
) -> None:
    """Its last part is the name that is listed and answered with; whoever asks for the whole path means it, too."""
    assert served.id == model_path.name
    answer = ask(client, str(model_path), [USER], max_tokens=1)
    assert answer.model == model_path.name
    assert client.completions.create(model=str(model_path), prompt=[5], max_tokens=1).model == model_path.name
    root = base_url.removesuffix("/v1")
    assert post(f"{root}/tokenize", {"model": str(model_path), "prompt": "tell"}).status_code == 200
    assert post(f"{root}/detokenize", {"model": str(model_path), "tokens": [5, 6]}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        ask(client, str(model_path.parent), [USER], max_tokens=1)
