"""Proves the plan once against vLLM's own loader, bit for bit; what disagrees goes through the loader ever after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.worker.attest import different_tensors, same_bits
from refitd.worker.copies import view_of
from refitd.worker.sources import CompiledSource, InplaceSource
from refitd.worker.weights import EngineWeights, torch_dtype

DIFFERS_FROM_LOADER = "vLLM's loader puts other bytes there than a plain copy"


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
    the loader loads those, and must arrive at the same bytes. Raises `refit_failed` if not.

    Holds the weights twice meanwhile, the second time in host memory.
    """
    plan = weights.plan
    before = {name: weights.flat(name).cpu().clone() for name in plan.parameters}
    weights.load(_taken_apart(weights, before))
    different = [name for name, held in before.items() if not same_bits(held, weights.flat(name).cpu())]
    if different:
        weights.demote({name.rpartition(".")[0]: DIFFERS_FROM_LOADER for name in different})
        message = "the plan was wrong; the next refit sends what it got wrong through vLLM's loader"
        raise ProtocolError(ErrorCode.REFIT_FAILED, message, parameters=different[:100])
    weights.proven_plan = plan
    _give_back_buffers()


def _give_back_buffers() -> None:
    """The loader's, which PyTorch would keep for the engine although the trainer needs the memory more."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _taken_apart(weights: EngineWeights, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint tensors by name; elements that other ranks hold are zero."""
    for name, routes in weights.plan.routes.items():
        expected = weights.expected[name]
        tensor = torch.zeros(expected.shape, dtype=torch_dtype(expected.dtype))
        for route in routes:
            held = view_of(parameters[route.parameter], route.transfer.target)
            view_of(tensor.view(-1), route.transfer.source).copy_(held)
        yield name, tensor
