"""Moves tensors into other memory without changing the tensor objects: optimisers, ties and hooks go on working."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self
from weakref import WeakValueDictionary

import torch

from refit_protocol.tensors import aligned
from refit_trainer.errors import NotShareable

ALIGNMENT_BYTES = 64

# By address: memory that tensors were moved into. They may be moved again.
_destinations: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


@dataclass(frozen=True)
class Relocation:
    """Which bytes of which storage go where in new memory of `size_bytes`."""

    ranges: Sequence[StorageRange]
    offsets: Sequence[int]
    size_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Self:
        """Tensors that share storage will go on sharing it; strides are kept, overlapping elements are not.

        Raises `NotShareable` for tensors in a storage of which somebody else holds a tensor too.
        """
        _make_dense(tensors)
        ranges = _ranges(tensors)
        for storage_range in ranges:
            storage_range.check_movable()
        offsets, size_bytes = _placed(ranges)
        return cls(ranges, offsets, max(size_bytes, ALIGNMENT_BYTES))

    def into(self, memory: torch.Tensor) -> None:
        """`memory` is flat, uint8, on the tensors' device, and has `size_bytes`; it lives as long as a tensor in it."""
        _destinations[memory.data_ptr()] = memory
        for storage_range, offset_bytes in zip(self.ranges, self.offsets, strict=True):
            storage_range.move_to(memory, offset_bytes)


@dataclass
class StorageRange:
    """The bytes `[begin, end)` of one storage that its tensors touch."""

    begin: int
    end: int
    tensors: list[torch.Tensor]

    def check_movable(self) -> None:
        """A flat buffer goes on being written by who holds it (Megatron, DeepSpeed, Apex), and tensors that were moved
        out of it would see nothing of that. Aliases of one whole tensor (`state_dict()`) are only left behind."""
        storage = self.tensors[0].untyped_storage()
        alone = len(self.tensors) == 1 and self.end - self.begin == storage.nbytes()
        if alone or storage.data_ptr() in _destinations or self._users() <= len(self._known()):
            return
        raise NotShareable(
            f"{len(self.tensors)} of the tensors lie in a flat buffer of {storage.nbytes()} bytes that somebody else, "
            "such as an optimiser, holds too: moved to other memory they would no longer be parts of it. Do not share "
            "this module, refit() then goes through buckets; or drop what else refers to the buffer"
        )

    def _users(self) -> int:
        """The tensors, ours or not, that the storage has in all; without the reference by which it is asked."""
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in self.tensors)}
        return sum(torch._C._storage_Use_Count(cdata) - 1 for cdata in storages)

    def _known(self) -> set[int]:
        """Ours, and what they are views of."""
        bases = (tensor._base for tensor in self.tensors)
        return {tensor._cdata for tensor in [*self.tensors, *bases] if tensor is not None}

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
