"""Tensors that wait in device memory for the loader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from refit_protocol.tensors import BucketPiece, DType, TensorShape
from refitd.worker.buckets import Announcement, BucketRefit, BucketSource
from refitd.worker.collective import OwnBuffer
from refitd.worker.sources import Segments

ELEMENTS = 1 << 20
LONG_CYCLES = 200_000_000


def test_a_bucket_may_be_overwritten_once_its_copy_has_come_back(device: torch.device) -> None:
    """Whatever the device still had to do before: the trainer writes the next bucket on a stream of its own."""
    tensor = TensorShape(name="w", dtype=DType.FLOAT32, shape=(ELEMENTS,))
    plan: Any = SimpleNamespace(routes={})
    weights: Any = SimpleNamespace(device=device, aliases={}, load=lambda tensors: loaded.extend(tensors))
    loaded: list[tuple[str, torch.Tensor]] = []
    bucket = torch.ones(ELEMENTS, device=device)
    source = BucketSource(Segments.around([OwnBuffer(bucket.view(torch.uint8))]), planned=True)
    refit = BucketRefit(weights, source, Announcement(plan, {"w": tensor}, {"w": "not a plain copy"}))
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(LONG_CYCLES)
        refit.copy(0, (BucketPiece(name="w", first=0, count=ELEMENTS, offset_bytes=0),))
    bucket.zero_()
    torch.cuda.synchronize(device)
    refit.load_staged()
    assert loaded[0][1].eq(1).all()
