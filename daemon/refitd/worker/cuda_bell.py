"""Copies that wait on the device until a trainer rings: no process has to be woken between its word and the first byte.

A kernel that waited would hold the device; a stream that waits for a word of memory holds nothing. It could be waiting
for ever, though, so the worker can ring as well, and has the copy find out on the device that it is not to run.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch

from refit_protocol.bell import ARRIVED_OFFSET_BYTES, AWAITED_OFFSET_BYTES, WORD_STRIDE_BYTES, unrung_number
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import MemfdSegment
from refitd.worker.boundary import PAUSE_SECONDS
from refitd.worker.cuda_copies import DeviceCopies
from refitd.worker.cuda_kernels import launch
from refitd.worker.memory import map_memfd

# Of cuMemHostRegister: for every context, and with an address for the device.
_PORTABLE, _DEVICE_MAP = 1, 2
# Of cuStreamWaitValue32: (int32_t)(*address - value) >= 0.
_GREATER_OR_EQUAL = 0

_Behind = TypeVar("_Behind")

logger = logging.getLogger(__name__)


class Bell:
    """A worker's words of a trainer's bell, as this process and its device see them, and the stream that waits."""

    def __init__(self, segment: MemfdSegment, worker: int, device: torch.device) -> None:
        """Raises `memory_unavailable`, also where no stream of the device can wait for it."""
        self._mapped = map_memfd(segment, writable=True)
        self._offset_bytes = worker * WORD_STRIDE_BYTES
        self._rung = ctypes.c_uint32.from_buffer(self._mapped, self._offset_bytes)
        self._arrived = ctypes.c_uint32.from_buffer(self._mapped, self._offset_bytes + ARRIVED_OFFSET_BYTES)
        self._awaited = ctypes.c_uint32.from_buffer(self._mapped, self._offset_bytes + AWAITED_OFFSET_BYTES)
        # One for good: PyTorch keeps memory for each stream that ever allocated some.
        self.stream = torch.cuda.Stream(device)
        with torch.cuda.device(device):
            self._address = _register(self._mapped)
            try:
                # For a word that is there already: what a device cannot do is found out before anything relies on it.
                number = self._rung.value
                self.hold(number)
                self.end_waiting(number)
            except BaseException:
                self.close()
                raise

    def reset(self, number: int) -> None:
        """As it is before it is rung for `number`; a word of an earlier daemon may be anything."""
        self.tell_awaited(0)
        self._rung.value = self._arrived.value = unrung_number(number)

    def ring(self, number: int) -> None:
        self._rung.value = number

    def end_waiting(self, number: int) -> None:
        """Comes back when all is done that is enqueued on `stream`. Rings again and again: a late ring for an earlier
        refit, by another stream of the trainer's, could take the number back before the device has looked."""
        while not self.stream.query():
            self.ring(number)
            time.sleep(PAUSE_SECONDS)

    def tell_arrival(self, number: int) -> None:
        """For a trainer that looks at its bell, long before the daemon's answer."""
        self._arrived.value = number

    def tell_awaited(self, number: int) -> None:
        """For a trainer that may ring for it without another word; 0 once it need not any more."""
        self._awaited.value = number

    def hold(self, number: int) -> None:
        """What is enqueued on `stream` behind this waits until the bell is rung for `number`."""
        _checked(
            "cuStreamWaitValue32_v2",
            ctypes.c_void_p(self.stream.cuda_stream),
            ctypes.c_uint64(self._address + self._offset_bytes),
            ctypes.c_uint32(number),
            _GREATER_OR_EQUAL,
        )

    def close(self) -> None:
        """Nothing waits for it any more."""
        _unregister(self._mapped)


class WaitingCopies(Generic[_Behind]):
    """The copies of one refit behind the bell, and behind them whatever `enqueue` enqueues, whose result is `behind`.

    `rehearsal` is the same for what was there before. Ends with `run` or `settle`.
    """

    def __init__(self, bell: Bell, number: int, copies: DeviceCopies, enqueue: Callable[[], _Behind]) -> None:
        self._bell = bell
        self._number = number
        self._copies = copies
        self._may_run = torch.zeros(1, dtype=torch.int32, device=copies.device)
        self._cancelled = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._ran = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        bell.reset(number)
        torch.cuda.synchronize(copies.device)
        with torch.cuda.stream(bell.stream):
            # Once for nothing: a kernel that is loaded, or memory that is allocated, while a stream waits could wait
            # for that stream.
            launch("admit", 1, 1, self._cancelled, self._may_run, self._ran)
            self.rehearsal = enqueue()
            bell.stream.synchronize()
            self._ran.zero_()
            bell.hold(number)
            try:
                launch("admit", 1, 1, self._cancelled, self._may_run, self._ran)
                copies.start(self._may_run)
                self.behind = enqueue()
            except BaseException:
                # Nobody else would end the waiting.
                self.settle()
                raise

    def stand_by(self) -> None:
        """The trainer may ring by itself, until `run` or `settle`."""
        self._bell.tell_awaited(self._number)

    def run(self) -> None:
        """Rings for a trainer that has not; `copies.wait()` then waits for the end."""
        self._bell.tell_awaited(0)
        self._bell.ring(self._number)

    def tell_arrival(self) -> None:
        self._bell.tell_arrival(self._number)

    def settle(self) -> bool:
        """Whether the copies ran; nothing of them runs any more."""
        self._bell.tell_awaited(0)
        self._cancelled[0] = 1
        self._bell.ring(self._number)
        self._bell.end_waiting(self._number)
        return bool(self._ran[0])


def _register(mapped: mmap.mmap) -> int:
    """The address at which the device sees it."""
    address = ctypes.c_uint64()
    host = ctypes.c_void_p(_host_address(mapped))
    # Any call of the runtime gives this thread the context that the driver asks for.
    torch.cuda.current_stream().query()
    _checked("cuMemHostRegister_v2", host, ctypes.c_size_t(len(mapped)), _PORTABLE | _DEVICE_MAP)
    try:
        _checked("cuMemHostGetDevicePointer_v2", ctypes.byref(address), host, 0)
    except ProtocolError:
        _unregister(mapped)
        raise
    return address.value


def _unregister(mapped: mmap.mmap) -> None:
    """Raises nothing: the source goes all the same."""
    if result := _driver().cuMemHostUnregister(ctypes.c_void_p(_host_address(mapped))):
        logger.warning("a bell stays registered (CUDA says %d)", result)


def _host_address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def _checked(function: str, *arguments: object) -> None:
    found = getattr(_driver(), function, None)
    result = "nothing: the driver is too old" if found is None else found(*arguments)
    if result != 0:
        raise ProtocolError(ErrorCode.MEMORY_UNAVAILABLE, f"the bell cannot be used: {function} answers {result}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
