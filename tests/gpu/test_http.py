"""vLLM's OpenAI app of the release that the GPU extras install."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.daemon_process import DaemonProcess, running_daemon
from tests.gpu.conftest import SETTINGS, SHAPE
from tests.http.chats import USER, ask, prompt_ids
from tests.tiny_tokenizer import build_tokenizer
from tests.worker.models import build_model

WITH_HTTP = (
    *(setting for setting in SETTINGS if not setting.startswith("engine.tokenizer")),
    "http.enabled=true",
)


@pytest.fixture
def process(short_directory: Path) -> Iterator[DaemonProcess]:
    path = build_model("qwen3", short_directory / "http-model", seed=0, **SHAPE)
    build_tokenizer(path)
    with running_daemon(path, short_directory / "http", *WITH_HTTP) as started:
        yield started


def test_a_chat_is_answered_with_its_token_ids(process: DaemonProcess) -> None:
    """The answer carries the prompt's and its own token ids, logprobs and the version that made them."""
    url = process.status().http_url
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        (served,) = client.models.list().data
        answer = ask(client, served.id, [USER], max_tokens=4, ignore_eos=True)
        (choice,) = answer.choices
        assert len(choice.token_ids) == len(choice.logprobs.content) == 4
        assert choice.weights_versions == [[0, 4]]
        assert prompt_ids(answer)
