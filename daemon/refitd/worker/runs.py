"""Transfers taken apart into runs of consecutive elements, which is what a copy engine or a kernel sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refitd.worker.boxes import Box, Transfer


@dataclass(frozen=True)
class Runs:
    """`length` elements from each of `sources` on go to as many from each of `targets` on, all counted in elements."""

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    length: int


def runs_of(transfer: Transfer) -> Runs:
    """The longest runs of a merged transfer, in its order; single elements where neither side is consecutive."""
    sizes = transfer.source.sizes
    consecutive = bool(sizes) and transfer.source.strides[-1] == 1 and transfer.target.strides[-1] == 1
    outer = len(sizes) - 1 if consecutive else len(sizes)
    return Runs(
        sources=_starts(transfer.source, outer),
        targets=_starts(transfer.target, outer),
        length=sizes[-1] if consecutive else 1,
    )


def _starts(box: Box, dimensions: int) -> NDArray[np.int64]:
    starts = np.array([box.offset], dtype=np.int64)
    for size, stride in zip(box.sizes[:dimensions], box.strides[:dimensions], strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts
