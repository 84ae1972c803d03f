"""Copies into a bucket on a GPU as one kernel over a table of chunks: one launch for the pieces of many tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from refit_trainer.packing_plan import Run

logger = logging.getLogger(__name__)

VECTOR_BYTES = 16
CHUNK_BYTES = 32 << 10
_THREADS = 1024
_ROW_BYTES = 24

# Compiled at run time without headers, so it names its own integer types. It is the daemon's kernel for the way back.
_SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

struct Chunk {
    u64 source;
    u64 target;
    u64 vectors;  // of 16 bytes
};

// One block a chunk; every thread has UNDER_WAY loads under way before its first store. Plain loads and stores: with
// hints to leave the caches alone they are slower.
#define UNDER_WAY 2
extern "C" __global__ __launch_bounds__(1024) void copy_chunks(const Chunk* chunks) {
    const Chunk chunk = chunks[blockIdx.x];
    const uint4* source = (const uint4*)chunk.source;
    uint4* target = (uint4*)chunk.target;
    const u32 count = (u32)chunk.vectors;
    u32 at = threadIdx.x;
    for (; at + (UNDER_WAY - 1) * blockDim.x < count; at += UNDER_WAY * blockDim.x) {
        uint4 held[UNDER_WAY];
#pragma unroll
        for (int i = 0; i < UNDER_WAY; i++) held[i] = source[at + i * blockDim.x];
#pragma unroll
        for (int i = 0; i < UNDER_WAY; i++) target[at + i * blockDim.x] = held[i];
    }
    for (; at < count; at += blockDim.x) target[at] = source[at];
}
"""


class Chunks(NamedTuple):
    """Parts of runs, an element each: from `offsets` in tensor number `tensors` to the address `targets`."""

    tensors: NDArray[np.int64]
    offsets: NDArray[np.int64]
    targets: NDArray[np.int64]
    vectors: NDArray[np.int64]


class DeviceCopies:
    """As `RunCopies` says. Addresses, offsets and sizes are multiples of `VECTOR_BYTES`."""

    def __init__(self, runs: Sequence[Sequence[Run]], device: torch.device) -> None:
        chunks = chunks_of([run for of_bucket in runs for run in of_bucket])
        counts = [sum(-(-run.size_bytes // CHUNK_BYTES) for run in of_bucket) for of_bucket in runs]
        self._ranges = list(pairwise(accumulate(counts, initial=0)))
        self._device = device
        self._chunks = [torch.from_numpy(column).to(device) for column in chunks]
        self._table = torch.empty((0, 3), dtype=torch.int64, device=device)

    def aim(self, addresses: Sequence[int]) -> None:
        """The table is made on the device from where the tensors lie; any stream may read it afterwards."""
        tensors, offsets, targets, vectors = self._chunks
        bases = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        self._table = torch.stack((bases[tensors] + offsets, targets, vectors), dim=1)
        torch.cuda.current_stream(self._device).synchronize()

    def copy(self, turn: int) -> None:
        first, end = self._ranges[turn]
        if first == end:
            return
        stream = torch.cuda.current_stream(self._device)
        # A table that is replaced lives as long as a launch that reads it, also if that was on another stream.
        self._table.record_stream(stream)
        rows = np.uint64(self._table.data_ptr() + first * _ROW_BYTES)
        with torch.cuda.device(self._device), _stream(stream.cuda_stream):
            _kernel()((end - first,), (_THREADS,), (rows,))


def chunks_of(runs: Sequence[Run]) -> Chunks:
    """In the order of the runs, none longer than `CHUNK_BYTES`."""
    tensors, offsets, targets, sizes = np.array(runs, dtype=np.int64).reshape(-1, 4).T
    counts = -(-sizes // CHUNK_BYTES)
    run = np.repeat(np.arange(len(runs)), counts)
    inside = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK_BYTES
    vectors = np.minimum(sizes[run] - inside, CHUNK_BYTES) // VECTOR_BYTES
    return Chunks(tensors[run], offsets[run] + inside, targets[run] + inside, vectors)


def has_kernel(device: torch.device) -> bool:
    """False, with a warning, where CuPy cannot compile: PyTorch then has to copy tensor by tensor."""
    with torch.cuda.device(device):
        return _kernel() is not None


@cache
def _kernel() -> Any:
    try:
        return _compiled()
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("tensors are packed one by one, the kernel that packs many cannot be compiled: %s", error)
        return None


def _compiled() -> Any:
    """Takes about a second the first time on a machine; the result is cached in CuPy's directory."""
    import cupy

    module = cupy.RawModule(code=_SOURCE, options=("-std=c++17",))
    try:
        module.compile()
    except cupy.cuda.compiler.CompileException as error:
        raise RuntimeError(str(error)) from error
    return module.get_function("copy_chunks")


@cache
def _stream(pointer: int) -> Any:
    import cupy

    return cupy.cuda.ExternalStream(pointer)
