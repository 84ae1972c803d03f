"""Trainer memory on the CPU: sealed memfds that a daemon of the same user opens through /proc."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from refit_protocol.tensors import MemfdSegment, Segment, aligned

ALIGNMENT_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Memfd:
    """`size_bytes` of shared memory as one flat uint8 tensor, `view`.

    The descriptor stays open until `close()`, or until nobody holds this object any more: a daemon opens the memory
    through it. The mapping lives as long as any tensor in it.
    """

    def __init__(self, name: str, size_bytes: int) -> None:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, size_bytes)
        # A daemon that reads cannot be hit by SIGBUS: the file keeps its size whatever we do.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        self.view = torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
        self.segment = MemfdSegment(pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino, size_bytes=size_bytes)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Bytes from the start of this memory to the tensor's first element, None if it lies elsewhere."""
        offset_bytes = tensor.data_ptr() - self.view.data_ptr()
        return offset_bytes if 0 <= offset_bytes < self.segment.size_bytes else None

    def close(self) -> None:
        self._close()


class MemfdMemory:
    """Several memfds, each a segment, as `backends.Buckets` describes them."""

    def __init__(self, memfds: Sequence[Memfd]) -> None:
        self._memfds = memfds

    @property
    def segments(self) -> list[Segment]:
        return [memfd.segment for memfd in self._memfds]

    @property
    def views(self) -> Sequence[torch.Tensor]:
        return [memfd.view for memfd in self._memfds]

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        for index, memfd in enumerate(self._memfds):
            if (offset_bytes := memfd.offset_of(tensor)) is not None:
                return index, offset_bytes
        return None

    def synchronise(self) -> None:
        """The CPU writes in program order; there is nothing to wait for."""

    def close(self) -> None:
        for memfd in self._memfds:
            memfd.close()


class MemfdBackend:
    def share(self, tensors: Sequence[torch.Tensor]) -> MemfdMemory:
        """Moves the tensors into one memfd. Tensors that share storage go on sharing it; strides are kept."""
        _make_dense(tensors)
        ranges = _ranges(tensors)
        offsets, size_bytes = _placed(ranges)
        memfd = Memfd("refit-parameters", max(size_bytes, ALIGNMENT_BYTES))
        for storage_range, offset_bytes in zip(ranges, offsets, strict=True):
            storage_range.move_to(memfd.view, offset_bytes)
        return MemfdMemory([memfd])

    def buckets(self, count: int, size_bytes: int, device: torch.device) -> MemfdMemory:
        assert device.type == "cpu", "registered for the CPU only"
        return MemfdMemory([Memfd(f"refit-bucket-{index}", size_bytes) for index in range(count)])


@dataclass
class _StorageRange:
    """The bytes `[begin, end)` of one storage that its tensors touch."""

    begin: int
    end: int
    tensors: list[torch.Tensor]

    def move_to(self, memory: torch.Tensor, offset_bytes: int) -> None:
        """Copies the range to `offset_bytes` of `memory` and makes every tensor a view there."""
        source = self.tensors[0].untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8).set_(source, self.begin, (self.end - self.begin,), (1,))
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


def _ranges(tensors: Iterable[torch.Tensor]) -> list[_StorageRange]:
    by_storage: dict[int, _StorageRange] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        begin, end = _touched_bytes(tensor)
        known = by_storage.setdefault(tensor.untyped_storage().data_ptr(), _StorageRange(begin, end, []))
        known.begin, known.end = min(known.begin, begin), max(known.end, end)
        known.tensors.append(tensor)
    return list(by_storage.values())


def _touched_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _placed(ranges: Iterable[_StorageRange]) -> tuple[list[int], int]:
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
    moved = torch.empty(0, dtype=tensor.dtype)
    tensor.data = moved.set_(memory.untyped_storage(), first, tensor.shape, tensor.stride())
