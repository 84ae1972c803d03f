"""Where the part of a sharded tensor lies, against what PyTorch itself makes of the same placements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from refit_trainer.errors import NotShareable
from refit_trainer.names import checkpoint_tensors
from refit_trainer.shards import is_sharded, local_part, shard_of

WORLD_SIZE = 4


@contextmanager
def standing_in_for(rank: int) -> Iterator[None]:
    """A rank whose collectives do nothing: where tensors are cut needs none."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 9), (1, 4), (2, 1)])
@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Replicate()), (Shard(0), Shard(0))],
    ids=["rows and columns", "replicas of rows", "columns twice", "rows of rows"],
)
def test_parts_are_those_that_torch_cuts(rank: int, shape: tuple[int, int], placements: list[Placement]) -> None:
    """Uneven and empty ones too: the region that is announced holds exactly the elements of the local tensor."""
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    with standing_in_for(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        shard, part = shard_of("w", tensor), local_part(tensor)
        if shard is None:
            assert torch.equal(part, whole)
            return
        assert shard.whole == shape
        region = tuple(slice(first, first + size) for first, size in zip(shard.offsets, part.shape, strict=True))
        assert torch.equal(part, whole[region])


def test_placements_without_a_box_are_refused() -> None:
    """A sum that is still to be made is nobody's part."""
    with standing_in_for(0):
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        partial = torch.distributed.tensor.DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with pytest.raises(NotShareable):
            shard_of("w", partial)


class Layer(torch.nn.Module):
    """As a mixture of experts keeps them in transformers: all experts of a layer in two parameters."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.experts = torch.nn.Module()
        self.mlp.experts.gate_up_proj = torch.nn.Parameter(gate_up)
        self.mlp.experts.down_proj = torch.nn.Parameter(down)


def test_experts_that_are_sharded_one_by_one_are_whole_tensors() -> None:
    """Three experts over four ranks: each has one under its own number, and the last rank has none."""
    gate_up, down = torch.randn(3, 8, 4), torch.randn(3, 4, 4)
    every = checkpoint_tensors(Layer(gate_up, down))
    found: dict[str, torch.Tensor] = {}
    for rank in range(WORLD_SIZE):
        with standing_in_for(rank):
            mesh = init_device_mesh("cpu", (WORLD_SIZE,))
            parts = [distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for each in (gate_up, down)]
            held = checkpoint_tensors(Layer(*parts))
            assert len(held) == (3 if rank < 3 else 0)
            assert not any(is_sharded(tensor) for tensor in held.values())
            found |= held
    assert found.keys() == every.keys()
    assert all(torch.equal(found[name], every[name]) for name in every)


def test_experts_that_are_cut_apart_are_refused() -> None:
    """Half of each expert is no tensor of a checkpoint."""
    with standing_in_for(0):
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        part = distribute_tensor(torch.randn(3, 8, 4), mesh, [Shard(1)], src_data_rank=None)
        with pytest.raises(NotShareable):
            checkpoint_tensors(Layer(part, part))


def test_whole_tensors_are_no_shards() -> None:
    """Plain tensors are what they are."""
    tensor = torch.ones(3)
    assert shard_of("w", tensor) is None
    assert local_part(tensor) is tensor
