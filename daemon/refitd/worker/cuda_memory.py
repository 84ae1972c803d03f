"""Opens device memory of a trainer by its CUDA IPC handle: once per allocation, however many sources use it."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from weakref import WeakValueDictionary

import cupy
import torch
import torch.utils.dlpack

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import CudaIpcSegment
from refitd.worker.memory import is_alive

WRITTEN_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 50e-6
# A bucket takes less than that: a sleep, which lasts twice as long as is asked for, would be a good part of it.
_AWAKE_SECONDS = 2e-3
_LOOK_SECONDS = 0.005
_LAZY_PEER_ACCESS = 1


class TrainerEvent:
    """An interprocess event that the trainer records after its writes."""

    def __init__(self, segment: CudaIpcSegment, device: torch.device) -> None:
        self._segment = segment
        try:
            self._event = torch.cuda.Event.from_ipc_handle(device, segment.event_handle)
            self._event.query()
        except (RuntimeError, ValueError, TypeError) as error:
            raise _unavailable(segment, f"has an event that cannot be opened: {error}") from error

    def wait(self) -> None:
        """Returns when all work before the last record is done; raises `memory_unavailable` if it never is."""
        asleep_after = time.monotonic() + _AWAKE_SECONDS
        for _ in self.turns():
            if time.monotonic() > asleep_after:
                time.sleep(_POLL_SECONDS)

    def is_done(self) -> bool:
        return bool(self._event.query())

    def turns(self) -> Iterator[None]:
        """One for each time that it was not done yet.

        Polled, because a stream that waits for the event of a killed process would wait for ever.
        """
        deadline = time.monotonic() + WRITTEN_TIMEOUT_SECONDS
        look = time.monotonic() + _LOOK_SECONDS
        while not self.is_done():
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_SECONDS
                if not is_alive(self._segment.pid):
                    raise _unavailable(self._segment, "was still being written when its process died")
            if now > deadline:
                raise _unavailable(self._segment, f"was still being written after {WRITTEN_TIMEOUT_SECONDS:g} s")
            yield


class CudaIpcMapping:
    """All bytes of one allocation of another process."""

    def __init__(self, segment: CudaIpcSegment, device: torch.device) -> None:
        _check_owner(segment, device)
        self._segment = segment
        self._allocation = _opened(segment, device)
        try:
            _check_size(segment, self._allocation)
            self._written = None if segment.event_handle is None else _opened_event(segment, device)
            self._data: torch.Tensor | None = _as_tensor(self._allocation, segment.size_bytes)
        except BaseException:
            _release(self._allocation)
            raise

    @property
    def data(self) -> torch.Tensor:
        assert self._data is not None, "the mapping is closed"
        return self._data

    @property
    def written(self) -> TrainerEvent | None:
        return self._written

    def close(self) -> None:
        if self._data is None:
            return
        self._data = None
        self._written = None
        _release(self._allocation)


def device_uuid(device: torch.device) -> str:
    """As the driver's own tools write it: `GPU-...`."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


@dataclass
class _Allocation:
    """A mapped allocation and how many mappings use it; the driver refuses to open a handle twice."""

    handle: bytes
    address: int
    device: torch.device
    users: int = 0


_open_allocations: dict[tuple[bytes, int | None], _Allocation] = {}
_open_events: WeakValueDictionary[tuple[bytes, int | None], TrainerEvent] = WeakValueDictionary()


def _opened(segment: CudaIpcSegment, device: torch.device) -> _Allocation:
    key = segment.handle, device.index
    found = _open_allocations.get(key)
    if found is None:
        found = _open_allocations[key] = _Allocation(segment.handle, _open(segment, device), device)
    found.users += 1
    return found


def _open(segment: CudaIpcSegment, device: torch.device) -> int:
    with torch.cuda.device(device):
        try:
            return int(cupy.cuda.runtime.ipcOpenMemHandle(segment.handle, _LAZY_PEER_ACCESS))
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise _unavailable(segment, f"cannot be opened: {error}; {_why_not_opened(segment)}") from error


def _release(allocation: _Allocation) -> None:
    allocation.users -= 1
    if allocation.users:
        return
    del _open_allocations[allocation.handle, allocation.device.index]
    with torch.cuda.device(allocation.device):
        # A refit that failed half-way may still be reading.
        torch.cuda.synchronize()
        cupy.cuda.runtime.ipcCloseMemHandle(allocation.address)


def _check_owner(segment: CudaIpcSegment, device: torch.device) -> None:
    own = device_uuid(device)
    if segment.device_uuid != own and not _can_read(segment.device_uuid, device):
        raise ProtocolError(
            ErrorCode.WRONG_DEVICE,
            f"the memory lies on {segment.device_uuid}, this worker runs on {own} and cannot read it there: trainer "
            "and engine need one device, or devices that reach each other and are both visible to the daemon",
            given=segment.device_uuid,
            expected=own,
        )
    if segment.pid == os.getpid():
        message = "the handle is the engine's own: a process cannot open its own memory by handle"
        raise ProtocolError(ErrorCode.INVALID_DESCRIPTOR, message)


@cache
def _can_read(uuid: str, device: torch.device) -> bool:
    """Whether that other device is visible to this process and this one can read its memory."""
    others = (index for index in range(torch.cuda.device_count()) if index != device.index)
    return any(
        device_uuid(torch.device("cuda", index)) == uuid and torch.cuda.can_device_access_peer(device, index)
        for index in others
    )


def _check_size(segment: CudaIpcSegment, allocation: _Allocation) -> None:
    size_bytes = _allocation_bytes(allocation.address)
    if segment.size_bytes > size_bytes:
        raise _unavailable(segment, f"has {size_bytes} bytes, not the announced {segment.size_bytes}")


def _allocation_bytes(address: int) -> int:
    base, size_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    result = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size_bytes), ctypes.c_uint64(address))
    assert result == 0, f"cuMemGetAddressRange answers {result} for memory that was just mapped"
    return size_bytes.value - (address - base.value)


def _opened_event(segment: CudaIpcSegment, device: torch.device) -> TrainerEvent:
    assert segment.event_handle is not None
    key = segment.event_handle, device.index
    found = _open_events.get(key)
    if found is None:
        found = _open_events[key] = TrainerEvent(segment, device)
    return found


def _as_tensor(allocation: _Allocation, size_bytes: int) -> torch.Tensor:
    memory = cupy.cuda.UnownedMemory(allocation.address, size_bytes, allocation, allocation.device.index)
    flat = cupy.ndarray((size_bytes,), dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(flat)
    return tensor


def _why_not_opened(segment: CudaIpcSegment) -> str:
    if not is_alive(segment.pid):
        return f"process {segment.pid} is gone, or in another PID namespace"
    return "is it a handle of cudaMalloc memory, in the same IPC namespace? refitd doctor tries it end to end"


def _unavailable(segment: CudaIpcSegment, what: str) -> ProtocolError:
    return ProtocolError(
        ErrorCode.MEMORY_UNAVAILABLE,
        f"device memory {segment.handle[:8].hex()}... of process {segment.pid} on {segment.device_uuid} {what}",
    )
