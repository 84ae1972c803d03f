"""Loads a checkpoint from disk into a running engine: a bucket refit whose trainer is a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from refit_protocol.tensors import ITEM_BYTES, BucketPiece, DType
from refitd.worker.attest import Attest, check_finite
from refitd.worker.boundary import Answer
from refitd.worker.buckets import Announcement, BucketRefit, BucketSource, announce
from refitd.worker.checkpoint import Checkpoint, check_architecture, layouts
from refitd.worker.completion import Clock, complete
from refitd.worker.plan import refuse_loader
from refitd.worker.state import WorkerState
from refitd.worker.weights import EngineWeights, torch_dtype

BUCKET = 0
BUCKET_BYTES = 64 << 20


def check_checkpoint(state: WorkerState, directory: Path, architectures: Any, plan: str) -> Answer:
    """Whether `reload` could load it."""
    check_architecture(directory, architectures)
    with Checkpoint(directory) as checkpoint:
        announced = _announced(state.weights, checkpoint, plan)
        return {"path": announced.path, "tensors": len(checkpoint.tensors), "bytes": checkpoint.size_bytes}


def reload(state: WorkerState, directory: Path, plan: str, attest: Attest, *, finite: bool) -> Answer:
    """All of it; see `refitd_reload`."""
    clock = Clock()
    with Checkpoint(directory) as checkpoint:
        under_way = Reload(state.weights, checkpoint, _announced(state.weights, checkpoint, plan))
        if finite:
            under_way.check_finite()
        clock.lap("validate")
        for pieces in under_way.filled():
            state.before_write()
            under_way.copy(pieces)
    under_way.refit.require_complete()
    return complete(state, under_way.refit, clock, attest, finite=False)


def _announced(weights: EngineWeights, checkpoint: Checkpoint, plan: str) -> Announcement:
    announced = announce(weights, list(checkpoint.tensors.values()), partial=False, planned=plan != "off")
    refuse_loader(announced.loader_tensors, plan)
    return announced


class FileBucket:
    """One bucket, filled from a checkpoint; on a GPU by way of pinned host memory."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._data = torch.empty(size_bytes, dtype=torch.uint8, device=device) if on_gpu else self._host
        self._typed: dict[DType, torch.Tensor] = {}

    def fill(self, checkpoint: Checkpoint, pieces: tuple[BucketPiece, ...]) -> None:
        """Raises `invalid_checkpoint` where the file has become too short, OSError where it cannot be read."""
        host = self._host.numpy().data
        for piece in pieces:
            size_bytes = piece.count * ITEM_BYTES[checkpoint.tensors[piece.name].dtype]
            checkpoint.read(piece, host[piece.offset_bytes : piece.offset_bytes + size_bytes])
        if self._data is not self._host:
            self._data.copy_(self._host)

    def typed(self, _segment: int, dtype: DType) -> torch.Tensor:
        if dtype not in self._typed:
            self._typed[dtype] = self._data.view(torch_dtype(dtype))
        return self._typed[dtype]

    def turns_until_written(self, _segment: int) -> Iterator[None]:
        """This process has written it."""
        return iter(())

    def close(self) -> None:
        self._typed.clear()


class Reload:
    """A checkpoint on its way into the engine. Nothing is written before `copy`."""

    def __init__(self, weights: EngineWeights, checkpoint: Checkpoint, announced: Announcement) -> None:
        self._weights = weights
        self._checkpoint = checkpoint
        self._bucket = FileBucket(BUCKET_BYTES, weights.device)
        self.refit = BucketRefit(weights, BucketSource(self._bucket, planned=True), announced)

    def check_finite(self) -> None:
        """Raises `not_finite`; reads the whole checkpoint."""
        check_finite(
            (piece.name, self._elements(piece), torch_dtype(self._weights.expected[piece.name].dtype))
            for pieces in self.filled()
            for piece in pieces
            if piece.name not in self._weights.plan.unused
        )

    def filled(self) -> Iterator[tuple[BucketPiece, ...]]:
        """What the bucket holds, until the next one is asked for."""
        for pieces in layouts(self._checkpoint.tensors.values(), BUCKET_BYTES):
            self._bucket.fill(self._checkpoint, pieces)
            yield pieces

    def copy(self, pieces: tuple[BucketPiece, ...]) -> None:
        """Writes to the engine."""
        self.refit.accept(pieces)
        self.refit.copy(BUCKET, pieces)

    def _elements(self, piece: BucketPiece) -> torch.Tensor:
        flat, at = self.refit.source.piece(BUCKET, piece, self._checkpoint.tensors[piece.name].dtype)
        return flat[at : at + piece.count]
