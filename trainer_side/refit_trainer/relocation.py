"""Moves tensors into other memory without changing the tensor objects: optimisers, ties and hooks go on working."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from refit_protocol.tensors import aligned

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Relocation:
    """Which bytes of which storage go where in new memory of `size_bytes`."""

    ranges: Sequence[StorageRange]
    offsets: Sequence[int]
    size_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Self:
        """Tensors that share storage will go on sharing it; strides are kept, overlapping elements are not."""
        _make_dense(tensors)
        ranges = _ranges(tensors)
        offsets, size_bytes = _placed(ranges)
        return cls(ranges, offsets, max(size_bytes, ALIGNMENT_BYTES))

    def into(self, memory: torch.Tensor) -> None:
        """`memory` is flat, uint8, on the tensors' device, and has `size_bytes`; it lives as long as a tensor in it."""
        for storage_range, offset_bytes in zip(self.ranges, self.offsets, strict=True):
            storage_range.move_to(memory, offset_bytes)


@dataclass
class StorageRange:
    """The bytes `[begin, end)` of one storage that its tensors touch."""

    begin: int
    end: int
    tensors: list[torch.Tensor]

    def move_to(self, memory: torch.Tensor, offset_bytes: int) -> None:
        """Copies the range to `offset_bytes` of `memory` and makes every tensor a view there."""
        source = self.tensors[0].untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=source.device)
        flat.set_(source, self.begin, (self.end - self.begin,), (1,))
        memory[offset_bytes : offset_bytes + len(flat)].copy_(flat)
        for tensor in self.tensors:
            _rebase(tensor, memory, offset_bytes - self.begin)


def _make_dense(tensors: Iterable[torch.Tensor]) -> None:
    """A tensor whose elements overlap (an expanded one) cannot be written by an optimiser, nor be exported."""
    for tensor in tensors:
        if _overlaps_itself(tensor):
            tensor.data = tensor.data.contiguous()


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _ranges(tensors: Iterable[torch.Tensor]) -> list[StorageRange]:
    by_storage: dict[int, StorageRange] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        begin, end = _touched_bytes(tensor)
        known = by_storage.setdefault(tensor.untyped_storage().data_ptr(), StorageRange(begin, end, []))
        known.begin, known.end = min(known.begin, begin), max(known.end, end)
        known.tensors.append(tensor)
    return list(by_storage.values())


def _touched_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _placed(ranges: Iterable[StorageRange]) -> tuple[list[int], int]:
    """Where each range goes, and the bytes of all; alignment relative to the storage's start is kept."""
    offsets, end = [], 0
    for storage_range in ranges:
        offset = aligned(end, ALIGNMENT_BYTES) + storage_range.begin % ALIGNMENT_BYTES
        offsets.append(offset)
        end = offset + storage_range.end - storage_range.begin
    return offsets, end


def _rebase(tensor: torch.Tensor, memory: torch.Tensor, shift_bytes: int) -> None:
    """Points the tensor at the same place of `memory`, `shift_bytes` further on; the Python object stays the same."""
    item_bytes = tensor.element_size()
    first = int(tensor.storage_offset()) + shift_bytes // item_bytes
    moved = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    tensor.data = moved.set_(memory.untyped_storage(), first, tensor.shape, tensor.stride())
