"""Opens the memory a trainer exported, read-only. One backend per kind of segment; this one reads sealed memfds."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import CudaIpcSegment, MemfdSegment, Segment

_F_GET_SEALS = 1034
_F_SEAL_SHRINK = 0x0002
_STAT_BLOCK_BYTES = 512


class Written(Protocol):
    """The end of what the trainer had enqueued; often one for many segments."""

    def wait(self) -> None:
        """Raises `memory_unavailable` if it will not come."""

    def is_done(self) -> bool:
        """Whether it has come."""

    def turns(self) -> Iterator[None]:
        """The same for whoever has other things to do: yields as long as it has not come."""


class Mapping(Protocol):
    """A segment in this process's address space; `data` is all its bytes as one uint8 tensor, never to be written."""

    @property
    def data(self) -> torch.Tensor: ...

    @property
    def written(self) -> Written | None:
        """What to wait for before reading; None where the trainer's writes are seen at once."""

    def close(self) -> None:
        """Unmaps, as soon as every tensor made from `data` is gone too."""


def is_alive(pid: int) -> bool:
    """Whether the process runs, as far as this one can see."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def open_segment(segment: Segment, device: torch.device) -> Mapping:
    """Raises `memory_unavailable` where the segment cannot be opened, `unsupported` where its kind does not suit the
    engine's device."""
    if isinstance(segment, MemfdSegment):
        return MemfdMapping(segment)
    if isinstance(segment, CudaIpcSegment) and device.type == "cuda":
        # CuPy is only there where the engine runs on a GPU.
        from refitd.worker.cuda_memory import CudaIpcMapping

        return CudaIpcMapping(segment, device)
    raise ProtocolError(
        ErrorCode.UNSUPPORTED,
        f"this engine runs on {device.type} and cannot read a segment of kind {type(segment).__name__}",
    )


def device_uuid(device: torch.device) -> str | None:
    """`GPU-...`, None where the engine runs on no GPU."""
    if device.type != "cuda":
        return None
    # CuPy is only there where the engine runs on a GPU.
    from refitd.worker.cuda_memory import device_uuid

    return device_uuid(device)


class MemfdMapping:
    """A memfd of another process, found through its `/proc/<pid>/fd` and mapped read-only."""

    def __init__(self, segment: MemfdSegment) -> None:
        self._data: torch.Tensor | None = _as_tensor(map_memfd(segment))

    @property
    def data(self) -> torch.Tensor:
        assert self._data is not None, "the mapping is closed"
        return self._data

    @property
    def written(self) -> None:
        return None

    def close(self) -> None:
        # The mapping goes with its last tensor: to unmap it under one that was forgotten would crash the engine.
        self._data = None


def map_memfd(segment: MemfdSegment, *, writable: bool = False) -> mmap.mmap:
    """Raises `memory_unavailable`."""
    descriptor = _open_descriptor(segment, os.O_RDWR if writable else os.O_RDONLY)
    try:
        _check(descriptor, segment)
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        return mmap.mmap(descriptor, segment.size_bytes, mmap.MAP_SHARED, access)
    except (OSError, ValueError) as error:
        raise _unavailable(segment, f"cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


def _open_descriptor(segment: MemfdSegment, access: int) -> int:
    path = f"/proc/{segment.pid}/fd/{segment.fd}"
    try:
        # Opening somebody else's fifo or device has effects, so look first; it is checked again once open.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _unavailable(segment, "is not a memfd")
        return os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise _unavailable(segment, "is not open there; the process is gone or in another PID namespace") from error
    except PermissionError as error:
        hint = "may not be opened: run trainer and daemon as one user, and leave the trainer dumpable (PR_SET_DUMPABLE)"
        raise _unavailable(segment, hint) from error
    except OSError as error:
        raise _unavailable(segment, f"cannot be opened: {error.strerror}") from error


def _check(descriptor: int, segment: MemfdSegment) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_ino != segment.inode:
        raise _unavailable(segment, f"is inode {status.st_ino}, not the announced {segment.inode}")
    if status.st_size < segment.size_bytes:
        raise _unavailable(segment, f"has {status.st_size} bytes, not the announced {segment.size_bytes}")
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError as error:
        raise _unavailable(segment, "is not a memfd, so it cannot be sealed") from error
    if not seals & _F_SEAL_SHRINK:
        raise _unavailable(segment, "is not sealed with F_SEAL_SHRINK; a truncation would crash the engine")
    _check_backed(segment, status.st_size - status.st_blocks * _STAT_BLOCK_BYTES)


def _check_backed(segment: MemfdSegment, missing_bytes: int) -> None:
    """Reading a hole makes the kernel find a page for it, and where there is none, that kills the reader."""
    available_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if missing_bytes > available_bytes:
        raise _unavailable(
            segment, f"is sparse: {missing_bytes} bytes were never written and only {available_bytes} are free"
        )


def _as_tensor(mapped: mmap.mmap) -> torch.Tensor:
    with warnings.catch_warnings():
        # That the memory is read-only is the point; nothing writes to a mapping.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))


def _unavailable(segment: MemfdSegment, what: str) -> ProtocolError:
    return ProtocolError(
        ErrorCode.MEMORY_UNAVAILABLE, f"memory segment fd {segment.fd} of process {segment.pid} {what}"
    )
