"""The bell of memory on NVIDIA GPUs: rung by the processor where nothing is under way, else by the trainer's stream."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from refit_protocol.bell import ARRIVED_OFFSET_BYTES, AWAITED_OFFSET_BYTES, BELL_BYTES, WORD_STRIDE_BYTES
from refit_protocol.tensors import MemfdSegment
from refit_trainer.early_commit import ReleaseWord
from refit_trainer.memory import Memfd

logger = logging.getLogger(__name__)

# Of cuMemHostRegister: for every context, and with an address for the device.
_PORTABLE, _DEVICE_MAP = 1, 2


class CudaBell:
    """`devices` are those of the memory that the copies read. What is registered with the driver for it is given back
    once nobody holds it any more."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._memfd = Memfd("refit-bell", BELL_BYTES)
        self.release = ReleaseWord(self._memfd.view.numpy())
        lines = self._memfd.view.numpy().view("<u4").reshape(-1, WORD_STRIDE_BYTES // 4)
        self._rung = lines[:, 0]
        self._arrived = lines[:, ARRIVED_OFFSET_BYTES // 4]
        self._awaited = lines[:, AWAITED_OFFSET_BYTES // 4]
        self._devices = [_index(device) for device in devices]
        self._is_ready = False
        self._registered: _Registered | None = None
        self._ringing: torch.cuda.Event | None = None

    @property
    def segment(self) -> MemfdSegment:
        return self._memfd.segment

    def make_ready(self) -> None:
        # Where several devices have to be done, no stream rings.
        if self._is_ready or len(self._devices) != 1:
            return
        self._is_ready = True
        self._registered = _registered(self._memfd.view, self._devices[0])
        if self._registered is not None:
            # A process that ends has nothing to give back, and no device to ask.
            weakref.finalize(self, self._registered.end).atexit = False

    def ring(self, number: int, workers: int) -> None:
        self._ringing = None
        if not any(map(_is_busy, self._devices)):
            self._rung[:workers] = number
        elif self._registered is not None:
            self._ringing = self._registered.ring(number, workers)

    def ring_awaited(self) -> bool:
        number = int(self._awaited[0])
        if number:
            # Workers that are not ready yet hear of it by the commit.
            self.ring(number, int((self._awaited == number).sum()))
        return bool(number)

    def await_ringing(self) -> None:
        if self._ringing is not None:
            self._ringing.synchronize()

    def arrived(self, number: int, workers: int) -> bool:
        return bool((self._arrived[:workers] == number).all())


class _Registered:
    """The memory of a bell as a device sees it, at `address`, until `end`."""

    def __init__(self, memory: torch.Tensor, device: int, address: int) -> None:
        self._memory = memory
        self._device = device
        self._address = address
        self._pid = os.getpid()
        # Behind the rings that may be yet to come, each on a stream of its own.
        self._ringing: list[torch.cuda.Event] = []

    def ring(self, number: int, workers: int) -> torch.cuda.Event:
        """By the calling thread's stream; what is returned is behind it."""
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            for worker in range(workers):
                address = ctypes.c_uint64(self._address + worker * WORD_STRIDE_BYTES)
                if result := _driver().cuStreamWriteValue32_v2(stream, address, ctypes.c_uint32(number), 0):
                    logger.warning(
                        "the stream cannot ring (CUDA says %d): copies begin when their end is asked for", result
                    )
                    break
            # Some words may be on their way in either case.
            ringing: torch.cuda.Event = torch.cuda.current_stream().record_event()
        self._ringing = [*(event for event in self._ringing if not event.query()), ringing]
        return ringing

    def end(self) -> None:
        """Waits for a stream that has yet to ring. Does nothing in a child that was forked, which has no device."""
        if os.getpid() != self._pid:
            return
        try:
            for ringing in self._ringing:
                ringing.synchronize()
            with torch.cuda.device(self._device):
                _enter_context()
                result = _driver().cuMemHostUnregister(ctypes.c_void_p(self._memory.data_ptr()))
        # Of PyTorch, where the device has failed: nothing can be given back then.
        except RuntimeError as error:
            logger.warning("a bell stays registered: %s", error)
            return
        if result:
            logger.warning("a bell stays registered (CUDA says %d)", result)


def _registered(memory: torch.Tensor, device: int) -> _Registered | None:
    """None where devices cannot see host memory."""
    address, host = ctypes.c_uint64(), ctypes.c_void_p(memory.data_ptr())
    driver = _driver()
    with torch.cuda.device(device):
        _enter_context()
        result = driver.cuMemHostRegister_v2(host, ctypes.c_size_t(memory.numel()), _PORTABLE | _DEVICE_MAP)
        if not result and (result := driver.cuMemHostGetDevicePointer_v2(ctypes.byref(address), host, 0)):
            driver.cuMemHostUnregister(host)
    if result:
        logger.warning("shared memory cannot be written by the device (CUDA says %d)", result)
        return None
    return _Registered(memory, device, address.value)


def _enter_context() -> None:
    """Any call of the runtime gives a thread the context of its device, which the driver asks for."""
    torch.cuda.current_stream().query()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _is_busy(device: int) -> bool:
    """Whether the calling thread's stream of this device has anything to do. A default stream has no handle of its
    own: it is that of the device which is current."""
    with torch.cuda.device(device):
        return bool(_stream_query()(torch._C._cuda_getCurrentRawStream(device)))


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
