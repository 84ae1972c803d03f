"""Two ranks: each copies its own slices, and together they hold exactly the trainer's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from refit_protocol.digest import DigestMode, combine_parts
from refit_protocol.messages import ManifestTensor
from refit_protocol.tensors import DType
from refit_trainer.digest import weights_digest
from tests.worker.engines import engine_config
from tests.worker.models import Kind
from tests.worker.trainers import ExportedTensors


@pytest.fixture
def ranks(checkpoint: Callable[[Kind, int], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[MultiprocExecutor]:
    """The workers of an untied Qwen3 at tensor parallel size 2, each its own process."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    executor = MultiprocExecutor(engine_config(checkpoint("qwen3", 0), tensor_parallel_size=2))
    yield executor
    executor.shutdown()


@pytest.mark.slow
def test_both_ranks_together_hold_the_trainers_weights(
    ranks: MultiprocExecutor, weights_of: Callable[[Kind, int], dict[str, torch.Tensor]]
) -> None:
    """From loading, from the first commit (by the loader) and from a replay, with strided row-parallel slices."""

    def call(method: str, *args: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = ranks.collective_rpc(method, args=args)
        assert all(answer.get("ok") for answer in answers), answers
        return answers

    def served(mode: DigestMode) -> str:
        return combine_parts(answer["digest_parts"] for answer in call("refitd_digest", mode.value))

    manifest = [
        ManifestTensor(**{**tensor, "dtype": DType(tensor["dtype"]), "shape": tuple(tensor["shape"])})
        for tensor in call("refitd_describe")[0]["manifest"]
    ]
    for mode in DigestMode:
        assert served(mode) == weights_digest(weights_of("qwen3", 0), manifest, mode)
    with ExportedTensors(weights_of("qwen3", 0)) as trainer:
        opened = call("refitd_open_source", 1, "inplace", *trainer.source, "require")
        assert [answer["path"] for answer in opened] == ["plan", "plan"]
        for seed in (1, 0):
            for name, tensor in weights_of("qwen3", seed).items():
                trainer.tensors[name].copy_(tensor)
            answers = call("refitd_commit", 1, None, "full")
            expected = weights_digest(trainer.tensors, manifest, DigestMode.FULL)
            assert combine_parts(answer["digest_parts"] for answer in answers) == expected
        call("refitd_close_all")
