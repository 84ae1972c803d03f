"""Copies between device memories as one kernel over a table of chunks: a launch instead of hundreds, and no gaps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from refitd.worker.copies import Copy, view_of
from refitd.worker.cuda_kernels import COPY_THREADS, compile_kernels, launch, prepared
from refitd.worker.runs import Runs, runs_of

CHUNK_BYTES = 32 << 10
VECTOR_BYTES = 16
MEANWHILE_SECONDS = 0.0003
# Shorter rows are left to PyTorch, whose strided copies do not need a table entry for each.
MIN_RUN_BYTES = 2 << 10


class DeviceCopies:
    """Compiled once; casts, unaligned and finely strided copies stay PyTorch's own, after the kernel."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        compile_kernels()
        self.size_bytes = sum(copy.transfer.elements * copy.target.element_size() for copy in copies)
        tables: list[NDArray[np.uint64]] = []
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for copy in copies:
            runs = runs_of(copy.transfer)
            if _is_tabled(copy, runs):
                tables.append(_chunks(copy, runs))
            else:
                self._others.append(
                    (view_of(copy.target, copy.transfer.target), view_of(copy.source, copy.transfer.source))
                )
        table = np.concatenate(tables) if tables else np.empty((0, 3), dtype=np.uint64)
        self._count = len(table)
        self._table = torch.from_numpy(table.view(np.int64)).to(copies[0].target.device)
        self.device = copies[0].target.device
        self._always = torch.ones(1, dtype=torch.int32, device=self.device)
        self._launch = prepared("copy_chunks", self._count, COPY_THREADS, self._table, self._always)
        self._arrived = torch.cuda.Event()

    @property
    def is_one_launch(self) -> bool:
        """Only then can the device decide whether it runs."""
        return not self._others

    def run(self) -> None:
        self.start()
        self.wait()

    def has_arrived(self) -> bool:
        return bool(self._arrived.query())

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        while meanwhile is not None and not self._arrives_within(MEANWHILE_SECONDS):
            meanwhile()
        self._arrived.synchronize()

    def _arrives_within(self, seconds: float) -> bool:
        until = time.perf_counter() + seconds
        while not self.has_arrived():
            if time.perf_counter() > until:
                return False
        return True

    def start(self, may_run: torch.Tensor | None = None) -> None:
        """Work that was enqueued before on this stream goes first, and may have decided that nothing `may_run`."""
        with torch.cuda.device(self.device), torch.no_grad():
            if self._count and may_run is None:
                self._launch()
            elif self._count:
                assert may_run is not None, "asked above"
                launch("copy_chunks", self._count, COPY_THREADS, self._table, may_run)
            for target, source in self._others:
                target.copy_(source, non_blocking=True)
            self._arrived.record()


def _is_tabled(copy: Copy, runs: Runs) -> bool:
    item_bytes = copy.target.element_size()
    run_bytes = runs.length * item_bytes
    return (
        copy.source.dtype == copy.target.dtype
        and run_bytes % VECTOR_BYTES == 0
        and (run_bytes >= MIN_RUN_BYTES or len(runs.sources) == 1)
        and _aligned(copy.source, runs.sources)
        and _aligned(copy.target, runs.targets)
    )


def _aligned(tensor: torch.Tensor, starts: NDArray[np.int64]) -> bool:
    return not ((tensor.data_ptr() + starts * tensor.element_size()) % VECTOR_BYTES).any()


def _chunks(copy: Copy, runs: Runs) -> NDArray[np.uint64]:
    """(source address, target address, 16-byte vectors) of each chunk."""
    item_bytes = copy.target.element_size()
    run_bytes = runs.length * item_bytes
    inside = np.arange(0, run_bytes, CHUNK_BYTES, dtype=np.int64)
    sources = copy.source.data_ptr() + runs.sources[:, None] * item_bytes + inside
    targets = copy.target.data_ptr() + runs.targets[:, None] * item_bytes + inside
    vectors = np.broadcast_to(np.minimum(run_bytes - inside, CHUNK_BYTES) // VECTOR_BYTES, sources.shape)
    return np.stack([sources.ravel(), targets.ravel(), vectors.ravel()], axis=1).astype(np.uint64)
