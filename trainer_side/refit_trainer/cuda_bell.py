"""The bell of memory on NVIDIA GPUs: rung by the processor where nothing is under way, else by the trainer's stream."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from refit_protocol.bell import ARRIVED_OFFSET_BYTES, BELL_BYTES, WORD_STRIDE_BYTES
from refit_protocol.tensors import MemfdSegment
from refit_trainer.memory import Memfd

logger = logging.getLogger(__name__)

# Of cuMemHostRegister: for every context, and with an address for the device.
_PORTABLE, _DEVICE_MAP = 1, 2


class CudaBell:
    """`devices` are those of the memory that the copies read."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._memfd = Memfd("refit-bell", BELL_BYTES)
        lines = self._memfd.view.numpy().view("<u4").reshape(-1, WORD_STRIDE_BYTES // 4)
        self._rung = lines[:, 0]
        self._arrived = lines[:, ARRIVED_OFFSET_BYTES // 4]
        self._devices = [_index(device) for device in devices]
        self._address: int | None = None
        self._is_ready = False
        self._ringing: torch.cuda.Event | None = None

    @property
    def segment(self) -> MemfdSegment:
        return self._memfd.segment

    def make_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._address = _mapped(self._memfd.view)

    def ring(self, number: int, workers: int) -> None:
        streams = [ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index)) for index in self._devices]
        self._ringing = None
        if not any(map(_stream_query(), streams)):
            self._rung[:workers] = number
        elif len(streams) == 1 and self._address is not None:
            self._ring_by(streams[0], number, workers)

    def await_ringing(self) -> None:
        if self._ringing is not None:
            self._ringing.synchronize()

    def arrived(self, number: int, workers: int) -> bool:
        return bool((self._arrived[:workers] == number).all())

    def _ring_by(self, stream: ctypes.c_void_p, number: int, workers: int) -> None:
        assert self._address is not None
        for worker in range(workers):
            address = ctypes.c_uint64(self._address + worker * WORD_STRIDE_BYTES)
            if result := _driver().cuStreamWriteValue32_v2(stream, address, ctypes.c_uint32(number), 0):
                logger.warning(
                    "the stream cannot ring (CUDA says %d): copies begin when their end is asked for", result
                )
                return
        self._ringing = torch.cuda.current_stream(self._devices[0]).record_event()


def _mapped(memory: torch.Tensor) -> int | None:
    """The address at which devices see host memory; None where they cannot."""
    address, host = ctypes.c_uint64(), ctypes.c_void_p(memory.data_ptr())
    # Any call of the runtime gives this thread the context that the driver asks for.
    torch.cuda.current_stream().query()
    driver = _driver()
    result = driver.cuMemHostRegister_v2(host, ctypes.c_size_t(memory.numel()), _PORTABLE | _DEVICE_MAP)
    result = result or driver.cuMemHostGetDevicePointer_v2(ctypes.byref(address), host, 0)
    if result:
        logger.warning("shared memory cannot be written by the device (CUDA says %d)", result)
        return None
    return address.value


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _stream_query() -> Any:
    """The driver's function, called without letting go of the interpreter: it takes a fraction of a microsecond."""
    function = ctypes.PyDLL("libcuda.so.1").cuStreamQuery
    function.argtypes = (ctypes.c_void_p,)
    function.restype = ctypes.c_int
    return function


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
