"""Tensors that lie in parts with several ranks of a trainer: which one a worker reads where more than one would do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from refit_protocol.shards import Region, region_of
from refit_protocol.tensors import SourceTensor, TensorShape


def chosen_parts(
    tensors: Iterable[SourceTensor], is_near: Callable[[int], bool]
) -> dict[str, tuple[SourceTensor, ...]]:
    """By name, every region once: of replicas the first that lies on the worker's own device, else the first."""
    found: dict[str, dict[Region, SourceTensor]] = defaultdict(dict)
    for part in tensors:
        replicas = found[part.name]
        region = region_of(part)
        known = replicas.get(region)
        if known is None or (not is_near(known.segment) and is_near(part.segment)):
            replicas[region] = part
    return {name: _not_empty(tuple(parts.values())) for name, parts in found.items()}


def whole_tensor(part: SourceTensor) -> TensorShape:
    return TensorShape(name=part.name, dtype=part.dtype, shape=part.whole_shape)


def _not_empty(parts: tuple[SourceTensor, ...]) -> tuple[SourceTensor, ...]:
    """Without the parts of ranks that hold nothing, except that there always is one to tell shape and dtype from."""
    return tuple(part for part in parts if part.elements) or parts[:1]
