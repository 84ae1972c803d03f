"""Trainer memory on NVIDIA GPUs: parameters where PyTorch allocated them, exported by CUDA IPC handle."""

from __future__ import annotations

import ctypes
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Any

import torch
import torch.utils.dlpack

from refit_protocol.tensors import CudaIpcSegment, Segment
from refit_trainer.cuda_bell import CudaBell
from refit_trainer.errors import NotShareable
from refit_trainer.relocation import Relocation

logger = logging.getLogger(__name__)

# Of the driver's CUpointer_attribute: a number that no other allocation of this process has, before or after.
_BUFFER_ID = 7


@dataclass(frozen=True)
class Allocation:
    """The allocation around some tensors; `handle` exports all of it, None if CUDA IPC cannot."""

    address: int
    size_bytes: int
    handle: bytes | None


class WriteEvent:
    """Recorded after the trainer's writes, awaited by the daemon's workers before they read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._event = torch.cuda.Event(interprocess=True)
            self._event.record()
            self.handle: bytes = self._event.ipc_handle()

    def query(self) -> bool:
        """Whether there is nothing to wait for on the calling thread's stream."""
        return torch.cuda.current_stream(self.device).query()

    def record(self) -> None:
        """On an idle stream there is nothing to wait for: recording would only make the device change over to us."""
        if not self.query():
            self._event.record(torch.cuda.current_stream(self.device))


class Allocations:
    """Those at some addresses, told apart from later ones that the driver puts in the same places."""

    def __init__(self, addresses: Sequence[int]) -> None:
        self._addresses = addresses
        self._numbers = (ctypes.c_ulonglong * len(addresses))()
        size_bytes = ctypes.sizeof(ctypes.c_ulonglong)
        self._places = [ctypes.byref(self._numbers, index * size_bytes) for index in range(len(addresses))]
        if not self._ask():
            raise NotShareable("CUDA does not tell the numbers of the allocations that are to be exported")
        self._before = bytes(self._numbers)

    def are_the_same(self) -> bool:
        """Asked before every refit: a call to the driver for each, and no other work in Python."""
        return self._ask() and bytes(self._numbers) == self._before

    def _ask(self) -> bool:
        """False where one has been freed, and nothing new lies there."""
        return not any(map(_pointer_attribute(), self._places, repeat(_BUFFER_ID), self._addresses))


@dataclass(frozen=True)
class _Exported:
    allocation: Allocation
    segment: CudaIpcSegment
    event: WriteEvent


class CudaMemory:
    """Whole allocations as segments; the tensors in them own the memory. `owned` are flat tensors that we allocated."""

    def __init__(self, exported: Sequence[_Exported], owned: Sequence[torch.Tensor] = ()) -> None:
        self._exported = exported
        self._owned = owned
        self._allocations = Allocations([each.allocation.address for each in exported])

    @property
    def segments(self) -> list[Segment]:
        return [exported.segment for exported in self._exported]

    @property
    def views(self) -> Sequence[torch.Tensor]:
        return self._owned

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        for index, exported in enumerate(self._exported):
            offset_bytes = tensor.data_ptr() - exported.allocation.address
            if 0 <= offset_bytes < exported.allocation.size_bytes:
                return index, offset_bytes
        return None

    def is_in_place(self) -> bool:
        """False after, say, an offload to the CPU and back that gave the memory to the device in between: what a daemon
        has mapped is then the freed memory, even where the addresses are the same again."""
        if self._exported:
            # The driver answers a thread that has a context; any call of the runtime gives it one.
            self._exported[0].event.query()
        return self._allocations.are_the_same()

    def synchronise(self, segment: int | None = None) -> None:
        """Marks what is enqueued on the calling thread's current streams as to be finished before a daemon reads."""
        chosen = self._exported if segment is None else [self._exported[segment]]
        for event in {id(exported.event): exported.event for exported in chosen}.values():
            event.record()

    def bell(self) -> CudaBell:
        return CudaBell([torch.device(device) for device in {str(each.event.device) for each in self._exported}])

    def close(self) -> None:
        self._exported = ()
        self._owned = ()


class CudaBackend:
    def share(self, tensors: Sequence[torch.Tensor]) -> CudaMemory:
        """Exports the memory as it is. What cannot be exported from where it lies (expandable segments, CUDA's own
        memory pools, managed memory) is moved into plain cudaMalloc memory first, once."""
        events = {device: WriteEvent(device) for device in {tensor.device for tensor in tensors}}
        owned = [_moved(group, device) for device, group in _not_exportable(tensors).items()]
        found = {allocation_of(tensor): tensor.device for tensor in tensors if tensor.numel()}
        exported = [_exported(allocation, device, events[device]) for allocation, device in found.items()]
        return CudaMemory(exported, owned)

    def buckets(self, count: int, size_bytes: int, device: torch.device) -> CudaMemory:
        """Plain cudaMalloc memory, so that the trainer may run with expandable segments. Each has its own event."""
        device = _indexed(device)
        owned = [plain_memory(size_bytes, device) for _ in range(count)]
        return CudaMemory([_exported(allocation_of(view), device, WriteEvent(device)) for view in owned], owned)


def allocation_of(tensor: torch.Tensor) -> Allocation:
    """The allocation that holds the first element of the tensor; asks the driver."""
    base, size_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    with torch.cuda.device(tensor.device):
        result = _driver().cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size_bytes), ctypes.c_uint64(tensor.data_ptr())
        )
        if result != 0:
            raise NotShareable(f"CUDA does not know the memory at {tensor.data_ptr():#x} (error {result})")
        return Allocation(base.value, size_bytes.value, _handle(base.value))


def _handle(address: int) -> bytes | None:
    """None for memory that is no cudaMalloc allocation: CUDA claims such memory to be exportable, but then refuses."""
    runtime = _cupy().cuda.runtime
    try:
        return bytes(runtime.ipcGetMemHandle(address))
    except runtime.CUDARuntimeError:
        return None


def plain_memory(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Flat uint8 memory from cudaMalloc, freed with the tensor; raises `NotShareable` where there is not enough."""
    cupy = _cupy()
    with torch.cuda.device(device), cupy.cuda.Device(device.index):
        try:
            memory = cupy.cuda.Memory(size_bytes)
        except (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError) as error:
            raise NotShareable(f"{size_bytes} bytes of device memory are not free for an export: {error}") from error
        flat = cupy.ndarray((size_bytes,), dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(flat)
    return tensor


def device_uuid(device: torch.device) -> str:
    """As the driver's own tools write it: `GPU-...`."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _not_exportable(tensors: Sequence[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    found: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() and allocation_of(tensor).handle is None:
            found[tensor.device].append(tensor)
    return found


def _moved(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    relocation = Relocation.of(tensors)
    memory = plain_memory(relocation.size_bytes, device)
    relocation.into(memory)
    logger.info("moved %d bytes of parameters out of memory that CUDA IPC cannot export", relocation.size_bytes)
    return memory


def _exported(allocation: Allocation, device: torch.device, event: WriteEvent) -> _Exported:
    if allocation.handle is None:
        raise NotShareable(
            f"device memory at {allocation.address:#x} cannot be exported: allocate it without expandable_segments and "
            "cudaMallocAsync (PYTORCH_CUDA_ALLOC_CONF), and not as managed memory"
        )
    segment = CudaIpcSegment(
        pid=os.getpid(),
        device_uuid=device_uuid(device),
        handle=allocation.handle,
        size_bytes=allocation.size_bytes,
        event_handle=event.handle,
    )
    return _Exported(allocation, segment, event)


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _cupy() -> Any:
    """Raises `NotShareable` where CuPy is not installed."""
    try:
        import cupy
    except ImportError as error:
        raise NotShareable("exporting CUDA memory needs CuPy: pip install cupy-cuda12x or cupy-cuda13x") from error
    return cupy


@cache
def _pointer_attribute() -> Any:
    """The driver's function; it lets go of the interpreter, so that the client's loop does not wait for hundreds of
    calls."""
    function = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    function.restype = ctypes.c_int
    return function


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
