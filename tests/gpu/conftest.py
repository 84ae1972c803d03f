"""These tests need one NVIDIA GPU; elsewhere they are skipped and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from refit_trainer import Daemon, share_parameters
from tests.daemon_process import DaemonProcess, running_daemon
from tests.worker.models import build_model, random_model

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _what_is_missing()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


def _what_is_missing() -> str | None:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    try:
        import cupy  # noqa: F401
    except ImportError:
        return "needs CuPy, of the extra cuda12 or cuda13"
    return None


# FlashAttention wants head sizes of 64 and more; the rest is as small as on the CPU.
SHAPE = {"head_dim": 64}
SETTINGS = ("engine.tokenizer=false", "engine.gpu_memory_utilization=0.08", "engine.max_model_len=512")


def trainer_model(seed: int, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """On the device, not yet shared."""
    return random_model("qwen3", seed=seed, dtype=dtype, **SHAPE).to("cuda")


def load_values(model: PreTrainedModel, seed: int) -> None:
    """Gives a model the weights of another seed, in place."""
    other = random_model("qwen3", seed=seed, dtype=model.dtype, **SHAPE)
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(new)


@pytest.fixture(scope="session")
def checkpoints(short_directory: Path) -> dict[int, Path]:
    """The same shape with the weights of two seeds."""
    return {seed: build_model("qwen3", short_directory / f"gpu-model-{seed}", seed=seed, **SHAPE) for seed in (0, 1)}


@pytest.fixture(scope="session")
def gpu_process(checkpoints: dict[int, Path], short_directory: Path) -> Iterator[DaemonProcess]:
    """The session's daemon on the GPU, started on the weights of seed 0."""
    with running_daemon(checkpoints[0], short_directory / "gpu", *SETTINGS, "server.lease_seconds=10") as process:
        yield process


@pytest.fixture
def gpu_daemon(gpu_process: DaemonProcess) -> Iterator[Daemon]:
    """A fresh session on it."""
    with gpu_process.connect() as connected:
        yield connected


@pytest.fixture
def gpu_model() -> PreTrainedModel:
    """A trainer's model on the device with the weights of seed 0, shared."""
    return share_parameters(trainer_model(0))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
