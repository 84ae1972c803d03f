"""A torch module's tensors under the names of its checkpoint, which are the names the engine's loader knows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from refit_trainer.errors import NotShareable
from refit_trainer.shards import local_part, shard_of

# transformers 5 keeps a layer's experts in two fused parameters, checkpoints one tensor an expert and projection.
_FUSED = re.compile(r"(?P<experts>.*\.experts)\.(?P<which>gate_up_proj|down_proj)$")
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL_PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}
_MIXTRAL_LIKE = frozenset({"mixtral", "minimax"})


def bare_module(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside wrappers that only prefix its names: DistributedDataParallel, torch.compile."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def checkpoint_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Views of all parameters and persistent buffers by checkpoint name; tied ones come once, under the first name."""
    module = bare_module(module)
    mixtral_like = getattr(getattr(module, "config", None), "model_type", None) in _MIXTRAL_LIKE
    named: dict[str, torch.Tensor] = {}
    for name, tensor in own_tensors(module):
        named.update(_per_expert(name, tensor.detach(), mixtral_like=mixtral_like))
    return named


def own_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Under the module's own names: each parameter once, and persistent buffers as often as modules register them."""
    named: list[tuple[str, torch.Tensor]] = list(module.named_parameters())
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                named.append((f"{prefix}.{name}" if prefix else name, buffer))
    return named


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return module._modules["module"]
    return module._modules.get("_orig_mod")


def _per_expert(name: str, tensor: torch.Tensor, *, mixtral_like: bool) -> Iterator[tuple[str, torch.Tensor]]:
    fused = _FUSED.match(name)
    if fused is None or tensor.dim() != 3:
        yield _renamed(name, mixtral_like=mixtral_like), tensor
        return
    experts = _renamed(fused["experts"], mixtral_like=mixtral_like)
    words = _MIXTRAL_PROJECTIONS if mixtral_like else _PROJECTIONS
    first, held = _held_experts(name, tensor)
    for number, expert in enumerate(held, first):
        if fused["which"] == "down_proj":
            yield f"{experts}.{number}.{words['down']}.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{experts}.{number}.{words['gate']}.weight", gate
            yield f"{experts}.{number}.{words['up']}.weight", up


def _held_experts(name: str, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The first expert that lies on this rank, and all that do; raises `NotShareable` where experts are cut apart."""
    shard, part = shard_of(name, tensor), local_part(tensor)
    if shard is None:
        return 0, part
    if tuple(part.shape[1:]) != shard.whole[1:]:
        raise NotShareable(f"{name} is sharded inside its experts: shard it by expert, or pass full tensors to refit()")
    return shard.offsets[0], part


def _renamed(name: str, *, mixtral_like: bool) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.") if mixtral_like else name
