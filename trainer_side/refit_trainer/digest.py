"""The digest of a trainer's own weights, to be compared with the one the daemon reports for what it serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from refit_protocol.digest import (
    DigestMode,
    element_weights,
    lane_weights,
    run_sum,
    sampled_positions,
    to_hex,
)
from refit_protocol.tensors import DType
from refit_trainer.errors import LayoutMismatch, NotShareable

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1 << 20


class Described(Protocol):
    """A tensor of the daemon's manifest: its name and the dtype the engine keeps it in. Optional ones do not count."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def optional(self) -> bool: ...


def weights_digest(
    tensors: Mapping[str, Any], manifest: Iterable[Described], mode: DigestMode = DigestMode.SAMPLED
) -> str:
    """16 hex digits, as in `Status`; `tensors` holds a torch tensor or NumPy array for every required manifest tensor.

    Values are cast to the engine's dtype first, as a refit does. Raises `LayoutMismatch` for those that are missing.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"weights are a module or a mapping from names to tensors, no {type(tensors).__name__}")
    described = [tensor for tensor in manifest if not tensor.optional]
    if missing := [tensor.name for tensor in described if tensor.name not in tensors]:
        raise LayoutMismatch(
            f"the engine's model has {len(missing)} tensors that are not among these: {', '.join(missing[:5])}",
            details={"missing": missing},
        )
    return to_hex(sum(_tensor_sum(tensor, tensors[tensor.name], mode) for tensor in described))


def _tensor_sum(described: Described, values: Any, mode: DigestMode) -> int:
    import torch

    if hasattr(values, "full_tensor"):
        raise NotShareable(f"{described.name} is sharded: pass its full_tensor()")
    tensor = values.detach() if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    dtype: torch.dtype = getattr(torch, described.dtype.value)
    flat = tensor.reshape(-1)
    return (
        _sampled_sum(described.name, flat, dtype)
        if mode == DigestMode.SAMPLED
        else _full_sum(described.name, flat, dtype)
    )


def _sampled_sum(name: str, flat: torch.Tensor, dtype: torch.dtype) -> int:
    import torch

    positions = sampled_positions(name, flat.numel())
    factors = torch.from_numpy(element_weights(name, positions)).to(flat.device)
    return int((_bits(flat[torch.from_numpy(positions).to(flat.device)].to(dtype)) * factors).sum())


def _full_sum(name: str, flat: torch.Tensor, dtype: torch.dtype) -> int:
    import torch

    lanes = torch.from_numpy(lane_weights()).to(flat.device)
    return sum(
        run_sum(
            name,
            first,
            _bits(flat[first : first + CHUNK_ELEMENTS].to(dtype)),
            lanes,
            lambda array: torch.from_numpy(array).to(flat.device),
        )
        for first in range(0, flat.numel(), CHUNK_ELEMENTS)
    )


def _bits(values: torch.Tensor) -> torch.Tensor:
    import torch

    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(widths[values.element_size()]).to(torch.int64)
