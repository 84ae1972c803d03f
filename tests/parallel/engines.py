"""Engines of several workers, the model they serve, and what a fresh engine says."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from refit_protocol.states import EngineState
from refit_trainer import Daemon, share_parameters
from tests.conftest import GREEDY, PROMPT
from tests.daemon_process import DaemonProcess, running_daemon
from tests.worker.models import Kind, build_model, random_model

# Not a multiple of anything: the engine pads the vocabulary, and the last rank holds fewer rows than the others.
ODD_VOCABULARY = 509

Said = tuple[list[int], list[float]]
"""Greedy ids and their logprobs."""


@contextmanager
def parallel_daemon(directory: Path, kind: Kind, *settings: str) -> Iterator[DaemonProcess]:
    """A daemon that was started on weights of seed 0."""
    build_model(kind, directory / "model", seed=0, vocab_size=ODD_VOCABULARY)
    with running_daemon(directory / "model", directory / "run", "engine.tokenizer=false", *settings) as process:
        yield process


def odd_model(seed: int, kind: Kind = "qwen3") -> PreTrainedModel:
    return random_model(kind, seed=seed, vocab_size=ODD_VOCABULARY)


def shared_model(kind: Kind = "qwen3") -> PreTrainedModel:
    return share_parameters(odd_model(0, kind))


def load(model: PreTrainedModel, seed: int, kind: Kind = "qwen3") -> None:
    """Gives the shared model the weights of another seed, in place."""
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), odd_model(seed, kind).parameters(), strict=True):
            parameter.copy_(new)


def said(daemon: Daemon) -> Said:
    sample = daemon.generate_one(PROMPT, GREEDY)
    return sample.token_ids.tolist(), sample.logprobs.tolist()


def transformers_logprobs(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """What one process, without vLLM, gives the same continuation."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1].float()
    return logits.log_softmax(-1)[torch.arange(len(token_ids)), torch.tensor(token_ids)]


def worker_pids(process: DaemonProcess) -> list[int]:
    """Of the engine's workers, by rank."""
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in process.engine_pids()}
    return sorted((pid for pid, title in titles.items() if "Worker" in title), key=lambda pid: titles[pid])


def wait_until_refitting(looking: Daemon, refit: Future[Any]) -> None:
    """Every look is a round trip; the test's own timeout bounds it."""
    while looking.status().state is not EngineState.REFITTING:
        assert not refit.done(), refit.result()
