"""Compiled copies: made once for a layout, run at every commit, one pass over the bytes, several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from refitd.worker.boxes import Box, Transfer

CHUNK_BYTES = 16 << 20
MIN_BYTES_FOR_THREADS = 1 << 20
MAX_THREADS = 8


@dataclass(frozen=True)
class Copy:
    """Elements of `source` to elements of `target`, cast where the dtypes differ.

    Both tensors are one-dimensional and contiguous; the boxes count their elements.
    """

    source: torch.Tensor
    target: torch.Tensor
    transfer: Transfer


class CopyProgram:
    """Holds views of both sides, so it must be dropped before a mapping it reads can be closed."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        merged = merge_neighbours(copies)
        self.size_bytes = sum(copy.transfer.elements * copy.target.element_size() for copy in merged)
        plain = [copy for copy in merged if _is_plain(copy)]
        chunks = [chunk for copy in plain for chunk in _chunks(copy)]
        self._chunks = sorted(chunks, key=lambda chunk: chunk[0].nbytes, reverse=True)
        self._helpers = lane_count() - 1 if self.size_bytes >= MIN_BYTES_FOR_THREADS else 0
        # PyTorch spreads a cast over its own threads.
        self._others = [
            (view_of(copy.target, copy.transfer.target), view_of(copy.source, copy.transfer.source))
            for copy in merged
            if not _is_plain(copy)
        ]

    def run(self) -> None:
        self.start()

    def has_arrived(self) -> bool:
        return True

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """`start` has already waited for its threads."""

    def start(self) -> None:
        chunks = iter(self._chunks)
        futures = [_threads().submit(_copy_all, chunks) for _ in range(self._helpers)]
        try:
            _copy_all(chunks)
            self._copy_others()
        finally:
            # Nobody may go on while a thread still writes, whatever happened on this one.
            wait(futures)
        for future in futures:
            future.result()

    def _copy_others(self) -> None:
        with torch.no_grad():
            for target, source in self._others:
                target.copy_(source, non_blocking=True)


_Pair = tuple[NDArray[np.generic], NDArray[np.generic]]


def available_cpus() -> int:
    """CPUs of this process; the thread that asks may itself be bound to fewer."""
    return len(os.sched_getaffinity(os.getpid()))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(lane_count() - 1, 1), thread_name_prefix="refit-copy")


def lane_count() -> int:
    return min(available_cpus(), MAX_THREADS)


def _copy_all(chunks: Iterator[_Pair]) -> None:
    """Threads share the iterator: each takes the next chunk when it is done with one."""
    for target, source in chunks:
        np.copyto(target, source)


def _is_plain(copy: Copy) -> bool:
    return copy.source.dtype == copy.target.dtype and copy.target.device.type == "cpu"


def copy_on_this_thread(target: torch.Tensor, source: torch.Tensor) -> None:
    """Between tensors of one shape and dtype, without the threads the engine computes with."""
    if target.device.type == "cpu" and source.device.type == "cpu":
        np.copyto(_as_numpy(target), _as_numpy(source))
    else:
        target.copy_(source)


def wait_for_stream(device: torch.device) -> None:
    """Until all that this thread has enqueued is done: whoever overwrites a source or reads a target does so on another
    stream, or in another process."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def merge_neighbours(copies: Sequence[Copy]) -> list[Copy]:
    """Joins runs that follow each other on both sides."""
    ordered = sorted(
        (copy for copy in copies if copy.transfer.elements),
        key=lambda copy: (id(copy.target), copy.transfer.target.offset),
    )
    merged: list[Copy] = []
    for copy in ordered:
        if merged and _follows(copy, merged[-1]):
            merged[-1] = _joined(merged[-1], copy)
        else:
            merged.append(copy)
    return merged


def _follows(copy: Copy, before: Copy) -> bool:
    return (
        copy.target is before.target
        and copy.source is before.source
        and copy.transfer.source.is_run
        and before.transfer.source.is_run
        and copy.transfer.target.is_run
        and before.transfer.target.is_run
        and copy.transfer.target.offset == before.transfer.target.offset + before.transfer.elements
        and copy.transfer.source.offset == before.transfer.source.offset + before.transfer.elements
    )


def _joined(first: Copy, second: Copy) -> Copy:
    sizes = (first.transfer.elements + second.transfer.elements,)
    transfer = Transfer(Box(first.transfer.source.offset, sizes, (1,)), Box(first.transfer.target.offset, sizes, (1,)))
    return Copy(first.source, first.target, transfer)


def _chunks(copy: Copy) -> list[_Pair]:
    """NumPy views of about CHUNK_BYTES: NumPy copies on the calling thread alone and lets others run meanwhile."""
    target = _as_numpy(view_of(copy.target, copy.transfer.target))
    source = _as_numpy(view_of(copy.source, copy.transfer.source))
    if target.ndim == 0:
        return [(target, source)]
    rows = max(target.shape[0] * CHUNK_BYTES // max(target.nbytes, 1), 1)
    return [(target[row : row + rows], source[row : row + rows]) for row in range(0, target.shape[0], rows)]


def view_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box of a one-dimensional tensor, as a strided view."""
    return tensor.as_strided(box.sizes, box.strides, tensor.storage_offset() + box.offset)


_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    return tensor.detach().view(_SAME_WIDTH[tensor.element_size()]).numpy()
