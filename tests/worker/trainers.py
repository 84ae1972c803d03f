"""The trainer's side of a worker test: tensors in sealed memfds, described as the daemon passes them on."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

SEAL_SHRINK_AND_GROW = 0x0002 | 0x0004


class ExportedMemory:
    """One sealed memfd, writable here through `data`."""

    def __init__(self, size_bytes: int, seals: int = SEAL_SHRINK_AND_GROW) -> None:
        self.fd = os.memfd_create("exported", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.size_bytes = size_bytes
        self.data = torch.frombuffer(mmap.mmap(self.fd, size_bytes), dtype=torch.uint8)

    @property
    def segment(self) -> dict[str, Any]:
        inode = os.fstat(self.fd).st_ino
        return {"kind": "memfd", "pid": os.getpid(), "fd": self.fd, "inode": inode, "size_bytes": self.size_bytes}

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        whole = self.data.shape[0] // dtype.itemsize * dtype.itemsize
        return self.data[:whole].view(dtype).as_strided(shape, strides, offset_bytes // dtype.itemsize)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)


class ExportedTensors(ExportedMemory):
    """Named tensors one after the other; `tensors` are live views a test may change.

    `transposed` names those that lie with their dimensions in reverse order.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], transposed: Iterable[str] = ()) -> None:
        self.described: list[dict[str, Any]] = []
        end = 0
        for name, tensor in tensors.items():
            end = -(-end // tensor.element_size()) * tensor.element_size()
            strides = tensor.contiguous().stride()
            if name in transposed:
                strides = tensor.mT.contiguous().mT.stride()
            self.described.append(
                {
                    "name": name,
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                    "segment": 0,
                    "offset_bytes": end,
                    "strides": list(strides),
                }
            )
            end += tensor.nbytes
        super().__init__(max(end, 1))
        self.tensors = {
            described["name"]: self.view(tensor.dtype, described["offset_bytes"], tensor.shape, described["strides"])
            for described, tensor in zip(self.described, tensors.values(), strict=True)
        }
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    @property
    def source(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Segments and tensors of an in-place source."""
        return [self.segment], self.described
