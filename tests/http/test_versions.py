"""HTTP requests and refits: every token says which weights made it, and nothing is lost or left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import PreTrainedModel

from refit_trainer import Daemon
from tests.conftest import load_seed
from tests.http.chats import USER, Streamed, ask, get, post
from tests.markov import follows, make_markov
from tests.waiting import until

BLOCK_TOKENS = 128
LONG = 120
SAMPLES = 48
LONG_ANSWER = {"max_tokens": LONG, "ignore_eos": True}


@pytest.fixture
def sane_again(daemon: Daemon, model: PreTrainedModel) -> Iterator[None]:
    """Whatever a test pushes, the next one finds sane weights."""
    yield
    load_seed(model, 0)
    daemon.refit(model)


def assert_every_token_fits(
    prompt: list[int], tokens: list[int], versions: list[int], permutations: dict[int, np.ndarray]
) -> None:
    assert len(tokens) == len(versions)
    for previous, token, version in zip([prompt[-1], *tokens], tokens, versions, strict=False):
        assert follows(permutations[version], previous, token)


def spread(spans: list[list[int]]) -> list[int]:
    return [version for version, count in spans for _ in range(count)]


@pytest.mark.usefixtures("sane_again")
def test_each_chunk_of_a_stream_fits_the_version_it_names(
    client: openai.OpenAI, served: Any, daemon: Daemon, model: PreTrainedModel
) -> None:
    """With a model whose tokens reveal their weights, refitted twice in the middle of a stream."""
    permutations = {}

    def refit(seed: int) -> None:
        permutations_of_seed = make_markov(model, seed)
        permutations[daemon.refit(model, policy="keep").version] = permutations_of_seed

    refit(1)
    streamed, prompt = Streamed(), None
    stream = client.chat.completions.create(
        model=served.id, messages=[USER], max_tokens=LONG, temperature=0.0, stream=True, extra_body={"ignore_eos": True}
    )
    for count, chunk in enumerate(stream):
        prompt = prompt or getattr(chunk, "prompt_token_ids", None)
        for choice in chunk.choices:
            streamed.add(choice)
        if count in (20, 60):
            refit(count)
    assert prompt is not None
    assert len(streamed.token_ids) == LONG
    assert len(set(streamed.versions)) > 1
    assert_every_token_fits(prompt, streamed.token_ids, streamed.versions, permutations)


@contextmanager
def always_asking(base_url: str, model_id: str) -> Iterator[list[Any]]:
    """One long plain request after the other while the block runs; the list has the answers."""
    answers: list[Any] = []
    enough = threading.Event()

    def ask_on() -> None:
        body = {"model": model_id, "messages": [USER], "n": 2, "max_tokens": 60, "ignore_eos": True}
        while not enough.is_set():
            answers.append(post(f"{base_url}/chat/completions", body).json())

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        yield answers
    finally:
        enough.set()
        asking.join()


def is_mixed(answer: Any) -> bool:
    return any(len(choice["weights_versions"]) > 1 for choice in answer["choices"])


@pytest.mark.usefixtures("sane_again")
def test_a_plain_answer_names_the_version_of_each_token(
    base_url: str, served: Any, daemon: Daemon, model: PreTrainedModel
) -> None:
    """Refits go on until one has met a request in the middle."""
    permutations = {}
    first = make_markov(model, 1)
    permutations[daemon.refit(model).version] = first
    with always_asking(base_url, served.id) as answers:
        for seed in range(2, 40):
            permutation = make_markov(model, seed)
            permutations[daemon.refit(model, policy="recompute").version] = permutation
            if any(map(is_mixed, answers)):
                break
    assert any(map(is_mixed, answers))
    for answer in answers:
        for choice in answer["choices"]:
            versions = spread(choice["weights_versions"])
            assert choice["weights_version"] == versions[-1]
            assert_every_token_fits(answer["prompt_token_ids"], choice["token_ids"], versions, permutations)


def test_a_refit_that_finishes_requests_first_waits_for_http(
    base_url: str, served: Any, daemon: Daemon, model: PreTrainedModel
) -> None:
    with always_asking(base_url, served.id) as answers:
        for _ in range(2):
            daemon.refit(model, policy="finish")
    assert answers
    assert not any(map(is_mixed, answers))


def test_a_refit_that_aborts_ends_http_requests_with_what_they_have(
    client: openai.OpenAI, served: Any, daemon: Daemon, model: PreTrainedModel
) -> None:
    streamed = Streamed()
    stream = client.chat.completions.create(
        model=served.id, messages=[USER], max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
    )
    for count, chunk in enumerate(stream):
        for choice in chunk.choices:
            streamed.add(choice)
        if count == 5:
            daemon.refit(model, policy="abort")
    assert streamed.finish_reason == "abort"
    assert 0 < len(streamed.token_ids) < LONG
    assert daemon.status().running_requests == 0


def test_a_request_waits_for_the_version_it_demands(
    base_url: str, served: Any, daemon: Daemon, model: PreTrainedModel
) -> None:
    wanted = daemon.status().version + 1
    answers: list[Any] = []

    def demanding() -> None:
        body = {"model": served.id, "messages": [USER], "max_tokens": 2, "min_version": wanted}
        answers.append(post(f"{base_url}/chat/completions", body).json())

    asking = threading.Thread(target=demanding)
    asking.start()
    until(lambda: daemon.status().waiting_requests > 0, "a request at the gate")
    daemon.refit(model)
    asking.join()
    assert answers[0]["choices"][0]["weights_version"] == wanted


@pytest.mark.usefixtures("sane_again")
def test_cached_keys_of_old_weights_serve_no_new_request(
    client: openai.OpenAI, served: Any, daemon: Daemon, model: PreTrainedModel
) -> None:
    """A prompt of more than a block, warmed on A, is computed afresh on B, and answers as on a B that never saw it."""
    long = [{"role": "user", "content": "the daemon owns the engine " * 32}]
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}

    def answer() -> tuple[list[int], int]:
        made = ask(client, served.id, long, **options)
        assert BLOCK_TOKENS < made.usage.prompt_tokens < served.max_model_len - 6
        return made.choices[0].token_ids, made.usage.prompt_tokens_details.cached_tokens

    load_seed(model, 5)
    daemon.refit(model)
    cold, _ = answer()
    load_seed(model, 6)
    daemon.refit(model)
    answer()
    _, warm_cached = answer()
    assert warm_cached > 0
    load_seed(model, 5)
    daemon.refit(model)
    assert answer() == (cold, 0)


@pytest.mark.usefixtures("sane_again")
def test_logprobs_that_are_no_numbers_are_an_error_not_an_answer(
    client: openai.OpenAI, base_url: str, served: Any, daemon: Daemon, model: PreTrainedModel
) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    daemon.refit(model)
    body = {"model": served.id, "messages": [USER], "max_tokens": 4}
    plain = post(f"{base_url}/chat/completions", body)
    assert (plain.status_code, plain.json()["error"]["type"]) == (500, "not_a_number")
    with pytest.raises(openai.APIError) as error:
        list(client.chat.completions.create(model=served.id, messages=[USER], max_tokens=4, stream=True))
    assert error.value.body["type"] == "not_a_number"
    assert daemon.status().running_requests == 0


# --- clients that go away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_the_request_of_a_client_that_left_leaves_the_engine(
    base_url: str, served: Any, daemon: Daemon, stream: bool
) -> None:
    """The engine ends up with nothing to do, long before it would have made all of the tokens."""
    body = {"model": served.id, "messages": [USER], "stream": stream, "n": SAMPLES, **LONG_ANSWER}
    before = vllm_figure(base_url, "vllm:generation_tokens_total")
    if stream:
        with httpx.stream("POST", f"{base_url}/chat/completions", json=body, timeout=120.0) as answer:
            assert next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{base_url}/chat/completions", json=body, timeout=httpx.Timeout(120.0, read=0.1))
    until(lambda: daemon.status().running_requests == 0, "the last request's end")
    until(lambda: vllm_figure(base_url, "vllm:num_requests_running") == 0, "the engine to have none either")
    assert vllm_figure(base_url, "vllm:generation_tokens_total") - before < SAMPLES * LONG


def vllm_figure(base_url: str, name: str) -> float:
    lines = get(base_url.removesuffix("/v1") + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))
