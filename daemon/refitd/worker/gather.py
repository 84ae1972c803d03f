"""Reads single elements all over the memory of many tensors, prepared once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Elements = tuple[torch.Tensor, NDArray[np.int64]]
"""A flat tensor and indices into it."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Gather(Protocol):
    def bits(self) -> torch.Tensor:
        """The present bits of all elements as signed integers, in int64, in the order they were asked for."""


def gather(elements: Sequence[Elements]) -> Gather:
    if elements and elements[0][0].is_cuda:
        # CuPy is only there where the engine runs on a GPU.
        from refitd.worker.cuda_gather import DeviceGather

        return DeviceGather(elements)
    return _IndexedGather(elements)


class _IndexedGather:
    """One indexing per tensor."""

    def __init__(self, elements: Sequence[Elements]) -> None:
        self._elements = [
            (flat.view(_BITS[flat.element_size()]), torch.from_numpy(indices)) for flat, indices in elements
        ]

    def bits(self) -> torch.Tensor:
        if not self._elements:
            return torch.empty(0, dtype=torch.int64)
        return torch.cat([flat[indices].to(torch.int64) for flat, indices in self._elements])
