"""These tests need one NVIDIA GPU; elsewhere they are skipped and say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.digest import DigestMode
from refit_trainer import Daemon, Sampling, share_parameters
from refit_trainer.digest import weights_digest
from tests.daemon_process import DaemonProcess, start_daemon
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
# A fixed cache: engines that start at the same time would misread each other's memory as their own.
SETTINGS = (
    "engine.tokenizer=false",
    "engine.max_model_len=512",
    "engine.gpu_memory_utilization=0.08",
    "engine.extra.kv_cache_memory_bytes=1073741824",
    "server.lease_seconds=10",
)
PROMPT = [5, 60, 7, 400, 9]
GREEDY = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)


def sampled(daemon: Daemon) -> tuple[list[int], list[float]]:
    """Greedy ids and logprobs of a fixed prompt."""
    sample = daemon.generate_one(PROMPT, GREEDY)
    return sample.token_ids.tolist(), sample.logprobs.tolist()


def digest_of(daemon: Daemon, model: PreTrainedModel) -> str:
    """What the trainer computes of its own weights, on the CPU."""
    tensors = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return weights_digest(tensors, daemon.manifest().tensors, DigestMode.FULL)


@contextmanager
def running_daemons(
    directory: Path, wanted: Mapping[str, tuple[Path, Sequence[str]]]
) -> Iterator[dict[str, DaemonProcess]]:
    """Daemons by name, each with its checkpoint and settings, started at the same time."""
    started = {name: start_daemon(path, directory / name, *settings) for name, (path, settings) in wanted.items()}
    try:
        for process in started.values():
            process.wait_ready()
        yield started
    finally:
        for process in started.values():
            process.stop()


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
def gpu_processes(checkpoints: dict[int, Path], short_directory: Path) -> Iterator[dict[str, DaemonProcess]]:
    """Two daemons, each started on the weights of one seed."""
    wanted = {f"gpu-{seed}": (path, SETTINGS) for seed, path in checkpoints.items()}
    with running_daemons(short_directory, wanted) as processes:
        yield processes


@pytest.fixture(scope="session")
def fresh(gpu_processes: dict[str, DaemonProcess]) -> dict[int, tuple[list[int], list[float]]]:
    """What an engine generates that was started on the weights of a seed, before any refit."""
    found = {}
    for seed in (0, 1):
        with gpu_processes[f"gpu-{seed}"].connect() as daemon:
            assert daemon.status().version == 0
            found[seed] = sampled(daemon)
    return found


@pytest.fixture(scope="session")
def gpu_process(
    gpu_processes: dict[str, DaemonProcess], fresh: dict[int, tuple[list[int], list[float]]]
) -> DaemonProcess:
    """The one that the tests refit."""
    return gpu_processes["gpu-0"]


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
