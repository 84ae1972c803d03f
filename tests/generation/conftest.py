"""The session's daemon on weights A, and what transformers makes of the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from refit_trainer import Daemon, Sample, Sampling, share_parameters
from tests.conftest import PROMPT
from tests.daemon_process import DaemonProcess
from tests.worker.models import random_model

# How far a logprob computed in bfloat16 by one library may lie from another's.
CLOSE = 0.15


@pytest.fixture(scope="session")
def weights_a() -> PreTrainedModel:
    """The trainer's model of seed 0, shared; nobody may change it."""
    return share_parameters(random_model("qwen3", seed=0))


@pytest.fixture(scope="module")
def serving_a(daemon_process: DaemonProcess, fresh_sample: object, weights_a: PreTrainedModel) -> None:
    """Whatever an earlier test left behind, this module begins with weights A."""
    with daemon_process.connect() as daemon:
        daemon.refit(weights_a)


@pytest.fixture
def daemon(daemon: Daemon, serving_a: None) -> Daemon:
    return daemon


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(model_path)
    return loaded


@pytest.fixture(scope="session")
def reference(weights_a: PreTrainedModel) -> Reference:
    return Reference(weights_a)


class Reference:
    """Logits by transformers, of shape (tokens, vocabulary): row i is about the token after token i."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0].float()
        return logits

    def next_logits(self, sample: Sample, prompt: Sequence[int] = PROMPT) -> torch.Tensor:
        """One row for each token of the sample: what it was sampled from, before anything was done to it."""
        return self.logits([*prompt, *sample.token_ids.tolist()])[len(prompt) - 1 : -1]


def greedy(daemon: Daemon, prompt: Sequence[int] = PROMPT, **options: object) -> Sample:
    """What the most likely tokens make of `prompt`, twelve of them unless `options` say otherwise."""
    return daemon.generate_one(
        list(prompt), Sampling(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **options})
    )


def hot(daemon: Daemon, **options: object) -> Sample:
    """A sample at temperature 1."""
    return daemon.generate_one(PROMPT, Sampling(**{"max_tokens": 12, "ignore_eos": True, **options}))
