"""In-place refits of real vLLM models, compared bit for bit with a worker that loaded the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.worker.engines import LoadedWorker, differences
from tests.worker.models import Kind
from tests.worker.trainers import ExportedTensors

Weights = dict[str, torch.Tensor]
KINDS: list[Kind] = ["qwen3", "qwen3_tied", "llama", "qwen3_moe", "mixtral"]


@pytest.mark.parametrize("kind", KINDS)
def test_refits_reach_the_bytes_of_a_fresh_load(
    kind: Kind,
    worker_of: Callable[[Kind], LoadedWorker],
    weights_of: Callable[[Kind, int], Weights],
    fresh: Callable[[Kind, int], Weights],
) -> None:
    """B, A, B from live memory: the first commit goes through the loader, the others replay the plan."""
    worker = worker_of(kind)
    with ExportedTensors(weights_of(kind, 1)) as trainer:
        opened = worker.call("refitd_open_source", 7, "inplace", *trainer.source)
        assert (opened["path"], opened["loader_tensors"]) == ("plan", [])
        for seed in (1, 0, 1):
            for name, tensor in weights_of(kind, seed).items():
                trainer.tensors[name].copy_(tensor)
            committed = worker.call("refitd_commit", 7, None, "full", True)
            assert committed["path"] == "plan"
            assert differences(worker.served(), fresh(kind, seed)) == []
        worker.call("refitd_close_source", 7)
