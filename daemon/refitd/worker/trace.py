"""Watches vLLM's own loader place every checkpoint tensor, without copying anything.

The loader gets tensors on the meta device, so what is seen depends on the engine's parameters and on names and shapes
alone, never on where or in which dtype a trainer keeps its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refitd.worker.boxes import Box, Transfer
from refitd.worker.lora_layers import unwrapped

_aten = torch.ops.aten
_FILLS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}


@dataclass(frozen=True)
class TracedCopy:
    """The loader copied elements of the row-major checkpoint tensor into elements of the engine's parameter."""

    tensor: str
    parameter: str
    transfer: Transfer


@dataclass
class Trace:
    """What the loader did: plain copies, constant fills, and parameters written in a way that no copy describes."""

    copies: list[TracedCopy] = field(default_factory=list)
    fills: dict[str, list[Box]] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    tensors_of_opaque: dict[str, set[str]] = field(default_factory=dict)
    failure: str | None = None


def trace_loader(model: torch.nn.Module, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> Trace:
    """Runs `model.load_weights` on (name, shape, dtype) without writing a byte; `failure` tells why it gave up."""
    recorder = _LoadRecorder(dict(model.named_parameters()))
    try:
        with torch.no_grad(), unwrapped(model), recorder:
            model.load_weights(recorder.announce(tensors))  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001 - any model's loader, and whatever it raises only means "no plan"
        recorder.trace.failure = f"{type(error).__name__} at {recorder.current}: {error}"
    return recorder.trace


class _LoadRecorder(TorchDispatchMode):
    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.current = ""
        self._parameters = {_storage(parameter): (name, parameter) for name, parameter in parameters.items()}
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}
        self._numbers_read: set[str] = set()

    def announce(
        self, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape, dtype in tensors:
            self.current = name
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self._sources[_storage(tensor)] = (name, tensor)
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            self._numbers_read.add(self.current)
            return 0
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            written = self._parameters.get(_storage(args[0]))
            if written is not None:
                self._record(func, written[0], written[1], args)
                return args[0]
            if any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args[1:]):
                return args[0]
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, name: str, parameter: torch.Tensor, args: tuple[Any, ...]) -> None:
        target = _box(args[0], int(parameter.storage_offset()))
        if func is _aten.copy_.default:
            self._record_copy(name, target, args[0], args[1])
        elif func in _FILLS and self.current not in self._numbers_read:
            self.trace.fills.setdefault(name, []).append(target)
        else:
            self._give_up(name, f"the loader writes it by {func}")

    def _record_copy(self, name: str, target: Box, destination: torch.Tensor, source: torch.Tensor) -> None:
        found = self._sources.get(_storage(source)) if source.is_meta else None
        if found is None:
            self._give_up(name, "the loader computes it instead of copying it")
        elif source.shape != destination.shape:
            self._give_up(name, f"the loader broadcasts {list(source.shape)} to {list(destination.shape)}")
        else:
            self.trace.copies.append(TracedCopy(found[0], name, Transfer(_box(source, 0), target)))

    def _give_up(self, name: str, why: str) -> None:
        self.trace.opaque.setdefault(name, why)
        self.trace.tensors_of_opaque.setdefault(name, set()).add(self.current)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _box(tensor: torch.Tensor, base: int) -> Box:
    return Box(int(tensor.storage_offset()) - base, tuple(tensor.shape), tensor.stride())
