"""Checkpoints and workers, each made once for all tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

from tests.worker.engines import LoadedWorker
from tests.worker.models import Kind, build_model
from tests.worker.trainers import ExportedTensors

Weights = dict[str, torch.Tensor]
SOURCE = 11


@pytest.fixture(scope="package", autouse=True)
def small_engine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        # Workers replace it by a function that refuses.
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        yield


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind, int], Path]:
    """The folder of a random checkpoint, by kind and seed."""
    built: dict[tuple[Kind, int], Path] = {}

    def find(kind: Kind, seed: int) -> Path:
        if (kind, seed) not in built:
            built[kind, seed] = build_model(kind, tmp_path_factory.mktemp(f"{kind}-{seed}-"), seed)
        return built[kind, seed]

    return find


@pytest.fixture(scope="package")
def weights_of(checkpoint: Callable[[Kind, int], Path]) -> Callable[[Kind, int], Weights]:
    """The tensors of that checkpoint."""

    def read(kind: Kind, seed: int) -> Weights:
        return load_file(checkpoint(kind, seed) / "model.safetensors")

    return read


@pytest.fixture(scope="package")
def workers(checkpoint: Callable[[Kind, int], Path]) -> Iterator[Callable[[Kind, int], LoadedWorker]]:
    """A worker that has loaded that checkpoint and was not changed since."""
    loaded: dict[tuple[Kind, int], LoadedWorker] = {}

    def load(kind: Kind, seed: int) -> LoadedWorker:
        if (kind, seed) not in loaded:
            loaded[kind, seed] = LoadedWorker(checkpoint(kind, seed))
        return loaded[kind, seed]

    # vLLM's process groups are made for the first model, and only a model with experts gets the one for experts.
    load("qwen3_moe", 0)
    yield load
    for worker in loaded.values():
        worker.close()
    # Tests of other folders make torch's default process group themselves.
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(scope="package")
def fresh(workers: Callable[[Kind, int], LoadedWorker]) -> Callable[[Kind, int], Weights]:
    """What a worker serves that has just loaded that checkpoint: the result every refit has to reach.

    Of the worker that tests refit (see `worker_of`) this must be asked before its first refit.
    """
    known: dict[tuple[Kind, int], Weights] = {}

    def read(kind: Kind, seed: int) -> Weights:
        if (kind, seed) not in known:
            known[kind, seed] = workers(kind, seed).served()
        return known[kind, seed]

    return read


@pytest.fixture(scope="package")
def worker_of(
    workers: Callable[[Kind, int], LoadedWorker], fresh: Callable[[Kind, int], Weights]
) -> Callable[[Kind], LoadedWorker]:
    """The worker of a kind, loaded from seed 0; shared by all tests, each of which has to bring its own weights."""

    def load(kind: Kind) -> LoadedWorker:
        fresh(kind, 0)
        return workers(kind, 0)

    return load


@pytest.fixture
def worker(worker_of: Callable[[Kind], LoadedWorker]) -> Iterator[LoadedWorker]:
    """The untied Qwen3."""
    loaded = worker_of("qwen3")
    yield loaded
    loaded.call("refitd_close_all")


@pytest.fixture
def trainer(weights_of: Callable[[Kind, int], Weights]) -> Iterator[ExportedTensors]:
    """A trainer that holds the weights of seed 1."""
    with ExportedTensors(weights_of("qwen3", 1)) as exported:
        yield exported


@pytest.fixture
def opened(worker: LoadedWorker, trainer: ExportedTensors) -> LoadedWorker:
    """The worker, with the trainer's parameters open as SOURCE."""
    worker.call("refitd_open_source", SOURCE, "inplace", *trainer.source)
    return worker
