"""OpenAI clients of the session's daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.daemon_process import DaemonProcess


@pytest.fixture(scope="session")
def base_url(daemon_process: DaemonProcess) -> str:
    url = daemon_process.status().http_url
    assert url is not None
    return url


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture(scope="session")
def served(base_url: str) -> Any:
    """What `/v1/models` says of the one model: its id and `max_model_len`."""
    with openai.OpenAI(base_url=base_url, api_key="none") as connected:
        (only,) = connected.models.list().data
    return only


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(model_path)
    return loaded
