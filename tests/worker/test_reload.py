"""Reloads from disk: what the kernels read afterwards is what a fresh engine would read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from refit_protocol.tensors import BucketPiece
from refitd.worker import reload
from refitd.worker.checkpoint import Checkpoint
from tests.worker.engines import LoadedWorker, differences
from tests.worker.models import Kind

Weights = dict[str, torch.Tensor]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied", "qwen3_moe"])
@pytest.mark.parametrize(("plan", "bucket_bytes"), [("auto", 64 << 20), ("auto", 10_000), ("off", 10_000)])
def test_a_reloaded_engine_equals_a_fresh_one(
    kind: Kind,
    plan: str,
    bucket_bytes: int,
    checkpoint: Callable[[Kind, int], Path],
    worker_of: Callable[[Kind], LoadedWorker],
    fresh: Callable[[Kind, int], Weights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By plan or through vLLM's loader, whatever the bucket; packed experts included."""
    monkeypatch.setattr(reload, "BUCKET_BYTES", bucket_bytes)
    worker = worker_of(kind)
    for seed in (1, 0):
        answer = worker.call("refitd_reload", str(checkpoint(kind, seed)), plan)
        assert answer["path"] == ("plan" if plan == "auto" else "loader")
        assert differences(worker.served(), fresh(kind, seed)) == []


def test_a_file_cut_short_half_way_is_said_to_have_written(
    checkpoint: Callable[[Kind, int], Path],
    worker_of: Callable[[Kind], LoadedWorker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of it is in the engine, which must not serve it; the next reload mends that."""
    copied = shutil.copytree(checkpoint("qwen3", 1), tmp_path / "cut")
    read = Checkpoint.read
    pieces: list[BucketPiece] = []

    def read_and_cut(self: Checkpoint, piece: BucketPiece, into: memoryview) -> None:
        pieces.append(piece)
        if len(pieces) == 20:
            os.truncate(copied / "model.safetensors", 5000)
        read(self, piece, into)

    worker = worker_of("qwen3")
    with monkeypatch.context() as patch:
        patch.setattr(reload, "BUCKET_BYTES", 10_000)
        patch.setattr(Checkpoint, "read", read_and_cut)
        code, _, wrote = worker.refused("refitd_reload", str(copied))
    assert (code, wrote) == ("invalid_checkpoint", True)
    worker.call("refitd_reload", str(checkpoint("qwen3", 0)))
