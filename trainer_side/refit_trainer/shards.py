"""Sharded tensors (`DTensor`, as FSDP2 makes them): what of them lies here, and where that belongs in the whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from refit_protocol.tensors import Shard
from refit_trainer.errors import NotShareable

if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor) -> bool:
    return torch.distributed.is_available() and isinstance(tensor, DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor: itself, or the very object that holds this rank's part of a sharded one."""
    if not is_sharded(tensor):
        return tensor
    # `to_local` gives another tensor over the same memory, and what moves to other memory has to be this one.
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def shard_of(name: str, tensor: torch.Tensor) -> Shard | None:
    """None where the whole tensor is here. Raises `NotShareable` for placements that give no box of elements."""
    if not is_sharded(tensor):
        return None
    whole = tuple(tensor.shape)
    offsets, sizes = [0] * len(whole), list(whole)
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    for mesh_dimension, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            raise NotShareable(f"{name} is placed as {placement}: pass full tensors to refit() instead")
        first, size = _chunk(sizes[placement.dim], mesh.size(mesh_dimension), mesh.get_local_rank(mesh_dimension))
        offsets[placement.dim] += first
        sizes[placement.dim] = size
    if tuple(sizes) != tuple(local_part(tensor).shape):
        raise NotShareable(f"{name} holds {list(local_part(tensor).shape)} here, not the {sizes} of even shards")
    return None if sizes == list(whole) else Shard(whole=whole, offsets=tuple(offsets))


def _chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """Where part number `index` of `count` begins, and its size: all alike except for the last ones."""
    rows = -(-size // count)
    first = min(index * rows, size)
    return first, min(rows, size - first)


def gathered_from(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The flat tensors that FSDP2 gathers parameters from; they share the memory of the parameters' parts, padded.

    Raises `NotShareable` where this PyTorch keeps them elsewhere than those that are known.
    """
    if not torch.distributed.is_available():
        return
    for owner in module.modules():
        if isinstance(owner, FSDPModule):
            yield from _flat_parameters(owner)


def _flat_parameters(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    try:
        state = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            for parameter in group.fsdp_params if group is not None else ():
                yield parameter._sharded_param_data
    except AttributeError as error:
        raise NotShareable(
            f"the parameters of this FSDP cannot be moved ({error}): pass full tensors instead"
        ) from error
