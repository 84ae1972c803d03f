"""Trainer memory on the CPU: sealed memfds that a daemon of the same user opens through /proc."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from refit_protocol.tensors import MemfdSegment, Segment
from refit_trainer.relocation import Relocation

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

    def is_in_place(self) -> bool:
        """We hold the mapping, so nothing else can take its addresses."""
        return True

    def synchronise(self, segment: int | None = None) -> None:
        """The CPU writes in program order; there is nothing to wait for."""

    def bell(self) -> None:
        """Processors copy when they are told to."""

    def close(self) -> None:
        for memfd in self._memfds:
            memfd.close()


class MemfdBackend:
    def share(self, tensors: Sequence[torch.Tensor]) -> MemfdMemory:
        """Moves the tensors into one memfd. Tensors that share storage go on sharing it; strides are kept."""
        relocation = Relocation.of(tensors)
        memfd = Memfd("refit-parameters", relocation.size_bytes)
        relocation.into(memfd.view)
        return MemfdMemory([memfd])

    def buckets(self, count: int, size_bytes: int, device: torch.device) -> MemfdMemory:
        assert device.type == "cpu", "registered for the CPU only"
        return MemfdMemory([Memfd(f"refit-bucket-{index}", size_bytes) for index in range(count)])
