"""In-place refits of real vLLM models from tensors that lie in parts with several ranks of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from tests.worker.engines import LoadedWorker, differences
from tests.worker.models import Kind
from tests.worker.trainers import ExportedTensors

Weights = dict[str, torch.Tensor]
RANKS = 3


class Sharded:
    """Trainer ranks that each hold their part of every tensor, cut along `dimension` as `torch.chunk` cuts; tensors of
    one dimension lie whole with every rank."""

    def __init__(self, stack: ExitStack, weights: Weights, dimension: int) -> None:
        self._dimension = dimension
        self.shards: list[dict[str, Any]] = [{} for _ in range(RANKS)]
        self._memories = [
            stack.enter_context(ExportedTensors(dict(self._held(weights, rank)))) for rank in range(RANKS)
        ]

    def write(self, weights: Weights) -> None:
        for rank, memory in enumerate(self._memories):
            for name, tensor in self._held(weights, rank):
                memory.tensors[name].copy_(tensor)

    @property
    def source(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        parts = [
            {**described, "segment": rank, "shard": self.shards[rank].get(described["name"])}
            for rank, memory in enumerate(self._memories)
            for described in memory.described
        ]
        return [memory.segment for memory in self._memories], parts

    def _held(self, weights: Weights, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            if tensor.dim() == 1:
                yield name, tensor
                continue
            rows = -(-tensor.shape[self._dimension] // RANKS)
            first = min(rank * rows, tensor.shape[self._dimension])
            end = min(first + rows, tensor.shape[self._dimension])
            offsets = [first if dimension == self._dimension else 0 for dimension in range(tensor.dim())]
            self.shards[rank][name] = {"whole": list(tensor.shape), "offsets": offsets}
            yield name, tensor.narrow(self._dimension, first, end - first)


@contextmanager
def sharded(weights: Weights, dimension: int) -> Iterator[Sharded]:
    with ExitStack() as stack:
        yield Sharded(stack, weights, dimension)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied", "mixtral"])
def test_shards_reach_the_bytes_of_a_fresh_load(
    kind: Kind,
    dimension: int,
    worker_of: Callable[[Kind], LoadedWorker],
    weights_of: Callable[[Kind, int], Weights],
    fresh: Callable[[Kind, int], Weights],
) -> None:
    """B, A, B from three ranks with uneven shards: by the plan every time, proven after the first."""
    worker = worker_of(kind)
    with sharded(weights_of(kind, 1), dimension) as trainer:
        opened = worker.call("refitd_open_source", 7, "inplace", *trainer.source, "require")
        assert opened["path"] == "plan"
        for seed in (1, 0, 1):
            trainer.write(weights_of(kind, seed))
            committed = worker.call("refitd_commit", 7, None, "full", True)
            assert committed["path"] == "plan"
            assert differences(worker.served(), fresh(kind, seed)) == []
        worker.call("refitd_close_source", 7)


def test_without_a_plan_the_loader_gets_whole_tensors(
    worker_of: Callable[[Kind], LoadedWorker],
    weights_of: Callable[[Kind, int], Weights],
    fresh: Callable[[Kind, int], Weights],
) -> None:
    """With the plan switched off, parts are put together for vLLM's own loader."""
    worker = worker_of("qwen3")
    with sharded(weights_of("qwen3", 1), 0) as trainer:
        assert worker.call("refitd_open_source", 7, "inplace", *trainer.source, "off")["path"] == "loader"
        worker.call("refitd_commit", 7, None, "off", False)
        assert differences(worker.served(), fresh("qwen3", 1)) == []
        worker.call("refitd_close_source", 7)


def test_a_value_that_is_not_finite_in_one_part_is_found(
    worker_of: Callable[[Kind], LoadedWorker], weights_of: Callable[[Kind, int], Weights]
) -> None:
    """The finite check reads every part, and names the tensor, before anything is written."""
    worker = worker_of("qwen3")
    with sharded(weights_of("qwen3", 1), 0) as trainer:
        worker.call("refitd_open_source", 7, "inplace", *trainer.source)
        broken = {name: tensor.clone() for name, tensor in weights_of("qwen3", 1).items()}
        broken["lm_head.weight"][-1, -1] = float("inf")
        trainer.write(broken)
        code, details, wrote = worker.refused("refitd_commit", 7, None, "sampled", True)
        assert (code, details["tensors"], wrote) == ("not_finite", ["lm_head.weight"], False)
        worker.call("refitd_close_source", 7)
