"""Proves the plan once against vLLM's own loader, bit for bit; what disagrees goes through the loader ever after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import ITEM_BYTES
from refitd.worker.attest import different_tensors, same_bits
from refitd.worker.copies import view_of
from refitd.worker.plan import Plan, Route
from refitd.worker.sources import CompiledSource, InplaceSource
from refitd.worker.weights import EngineWeights, Expected, torch_dtype

DIFFERS_FROM_LOADER = "vLLM's loader puts other bytes there than a plain copy"
LEFT_ALONE_BY_LOADER = "vLLM's loader does not write it when it reloads"
_NOBODYS_BITS = 0xFF


def load_and_prove(weights: EngineWeights, source: InplaceSource, compiled: CompiledSource) -> None:
    """The loader writes all tensors of the source; the plan's copies must find nothing left to do."""
    plan, skipped = weights.plan, {*weights.aliases, *weights.plan.unused}
    weights.load((name, source.view(name)) for name in compiled.names if name not in skipped)
    different = different_tensors(compiled.copies)
    modules = {route.module: DIFFERS_FROM_LOADER for name in different for route in plan.routes[name]}
    if modules:
        weights.demote(modules)
    weights.proven_plan = weights.plan
    source.proven = True
    _give_back_buffers()


def prove_by_reload(weights: EngineWeights) -> None:
    """For refits that never have all tensors at hand: what the plan wrote is taken apart into checkpoint tensors again,
    the loader loads those, and must write every planned parameter without changing a bit. Raises `refit_failed` if not;
    the engine then holds what the loader wrote.

    The loader is given the engine's own memory to read, and what it writes is compared where it is about to be written,
    so nothing is held beyond what a reload of one module takes. That is sound whatever vLLM's order: up to the first
    write that changes a bit, which is noticed, every read gave what the plan had written.
    """
    plan = weights.plan
    writes = _Writes({name: weights.flat(name) for name in plan.parameters})
    tensors = _taken_apart(weights, _holders(weights))
    with writes:
        weights.load(tensors)
    _give_back_buffers()
    wrong = {
        **dict.fromkeys(writes.missing, LEFT_ALONE_BY_LOADER),
        **dict.fromkeys(writes.changed, DIFFERS_FROM_LOADER),
    }
    if wrong:
        weights.demote({name.rpartition(".")[0]: why for name, why in wrong.items()})
        message = "the plan was wrong; the next refit sends what it got wrong through vLLM's loader"
        raise ProtocolError(ErrorCode.REFIT_FAILED, message, parameters=sorted(wrong)[:100])
    weights.proven_plan = plan


def _give_back_buffers() -> None:
    """The loader's, which PyTorch would keep for the engine although the trainer needs the memory more."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class _Writes(TorchDispatchMode):
    """Sees all writes to some parameters: `changed` are those that got other bits, `missing` those nobody has written.

    A copy of what is there already is not made.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changed: set[str] = set()
        self.missing = set(parameters)
        self._names = {_storage(parameter): name for name, parameter in parameters.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        writes = func._schema.is_mutable and isinstance(args[0], torch.Tensor)
        name = self._names.get(_storage(args[0])) if writes else None
        if name is None:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            return self._copy(name, args[0], args[1])
        before = args[0].clone()
        result = func(*args, **(kwargs or {}))
        self._saw(name, same=same_bits(before, args[0]))
        return result

    def _copy(self, name: str, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        # vLLM ends the reload of what it loads in place by copying it to itself.
        if _storage(source) == _storage(target):
            return target
        given = source.to(device=target.device, dtype=target.dtype).expand_as(target)
        same = same_bits(target, given)
        self._saw(name, same=same)
        return target if same else target.copy_(given)

    def _saw(self, name: str, *, same: bool) -> None:
        self.missing.discard(name)
        if not same:
            self.changed.add(name)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


Holders = Mapping[str, tuple[torch.nn.Module, str]]


def _holders(weights: EngineWeights) -> Holders:
    """Where each planned parameter hangs: the loader finds LoRA's wrappers taken away, and names that go with them."""
    paths = {name: name.rpartition(".") for name in weights.plan.parameters}
    return {name: (weights.model.get_submodule(module), leaf) for name, (module, _, leaf) in paths.items()}


def _taken_apart(weights: EngineWeights, holders: Holders) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint tensors by name, module by module, for the loader holds all of a module until it is complete."""
    memory = {name: weights.flat(name) for name in weights.plan.parameters}
    memory.update({name: memory[name].clone() for name in _loaded_in_place(holders)})
    for names in _by_module(weights.plan):
        device = _place(weights.device, [weights.expected[name] for name in names])
        for name in names:
            routes, expected = weights.plan.routes[name], weights.expected[name]
            lying = _lying_whole(memory, routes, expected)
            yield name, _put_together(memory, routes, expected, device) if lying is None else lying


def _loaded_in_place(holders: Holders) -> list[str]:
    """What vLLM does not take away during a reload, such as biases: it writes that as the tensors come, and not when it
    has all of the module."""
    held = {name: module._parameters.get(leaf) for name, (module, leaf) in holders.items()}
    return [name for name, parameter in held.items() if parameter is not None and not parameter.is_meta]


def _by_module(plan: Plan) -> Iterable[list[str]]:
    names: dict[str, list[str]] = defaultdict(list)
    for name, routes in plan.routes.items():
        names[routes[0].module].append(name)
    return names.values()


def _place(device: torch.device, module: Sequence[Expected]) -> torch.device:
    """Where to put tensors together: a GPU may have no room for whole tensors of which it holds a small part."""
    if device.type != "cuda":
        return device
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    size_bytes = sum(prod(expected.shape) * ITEM_BYTES[expected.dtype] for expected in module)
    return device if 2 * size_bytes <= free else torch.device("cpu")


def _lying_whole(
    memory: Mapping[str, torch.Tensor], routes: Sequence[Route], expected: Expected
) -> torch.Tensor | None:
    """The tensor where it lies in one piece."""
    transfer, flat = routes[0].transfer, memory[routes[0].parameter]
    is_run = transfer.source.is_run and transfer.target.is_run
    if not is_run or transfer.elements != prod(expected.shape) or flat.dtype != torch_dtype(expected.dtype):
        return None
    return view_of(flat, transfer.target).view(expected.shape)


def _put_together(
    memory: Mapping[str, torch.Tensor], routes: Iterable[Route], expected: Expected, device: torch.device
) -> torch.Tensor:
    """A copy. Elements that other ranks hold are NaN or -1, so that a loader that takes one of them is found out."""
    dtype = torch_dtype(expected.dtype)
    size_bytes = prod(expected.shape) * dtype.itemsize
    flat = torch.full((size_bytes,), _NOBODYS_BITS, dtype=torch.uint8, device=device).view(dtype)
    for route in routes:
        view_of(flat, route.transfer.source).copy_(view_of(memory[route.parameter], route.transfer.target))
    return flat.view(expected.shape)
