"""Tensors whose parts lie with several ranks of one trainer: the arithmetic that proves that the parts make a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import SourceTensor

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, in elements along each dimension."""


def region_of(part: SourceTensor) -> Region:
    """Where the part lies in its whole tensor."""
    return ((0,) * len(part.shape) if part.shard is None else part.shard.offsets, part.shape)


def check_parts(ranks: Mapping[int, Sequence[SourceTensor]]) -> None:
    """Raises `group_mismatch` unless the parts of each tensor, of one dtype, make up a whole of one shape.

    Equal regions are replicas. Other regions may not overlap, and no element may be missing.
    """
    parts: dict[str, list[tuple[int, SourceTensor]]] = defaultdict(list)
    for rank, tensors in sorted(ranks.items()):
        for tensor in tensors:
            parts[tensor.name].append((rank, tensor))
    for name, of_tensor in parts.items():
        _check_same(name, "dtype", ((rank, part.dtype.value) for rank, part in of_tensor))
        _check_same(name, "shape", ((rank, list(part.whole_shape)) for rank, part in of_tensor))
        _check_regions(name, of_tensor)


def _check_same(name: str, what: str, values: Iterable[tuple[int, object]]) -> None:
    (first_rank, first), *others = values
    for rank, value in others:
        if value != first:
            raise _mismatch(f"{name}: {what} {first} on rank {first_rank}, {value} on rank {rank}", name)


def _check_regions(name: str, parts: Iterable[tuple[int, SourceTensor]]) -> None:
    holders: dict[Region, int] = {}
    for rank, part in parts:
        if part.elements or not prod(part.whole_shape):
            holders.setdefault(region_of(part), rank)
        whole = part.whole_shape
    ordered = sorted(holders)
    for index, region in enumerate(ordered):
        other = _first_overlap(region, ordered[index + 1 :])
        if other is not None:
            raise _mismatch(f"{name}: the parts of ranks {holders[region]} and {holders[other]} overlap", name)
    covered = sum(prod(sizes) for _, sizes in ordered)
    if covered != prod(whole):
        raise _mismatch(f"{name}: the ranks hold {covered} of {prod(whole)} elements", name)


def _first_overlap(region: Region, later: Iterable[Region]) -> Region | None:
    """`later` are regions in order, none of which begins before `region` in the first dimension."""
    for other in later:
        if region[0] and other[0][0] >= region[0][0] + region[1][0]:
            return None
        if all(
            begin < other_begin + other_size and other_begin < begin + size
            for begin, size, other_begin, other_size in zip(*region, *other, strict=True)
        ):
            return other
    return None


def _mismatch(message: str, tensor: str) -> ProtocolError:
    return ProtocolError(ErrorCode.GROUP_MISMATCH, message, tensor=tensor)
