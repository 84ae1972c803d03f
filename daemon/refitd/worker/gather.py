"""Reads single elements all over the memory of many tensors, prepared once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

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
    """One indexing per tensor, by NumPy: PyTorch's costs several times as much for the few elements of each."""

    def __init__(self, elements: Sequence[Elements]) -> None:
        self._runs = [
            _Run([(flat, np.concatenate([indices for _, indices in same])) for flat, same in _by_tensor(of_width)])
            for of_width in _by_width(elements)
        ]

    def bits(self) -> torch.Tensor:
        if not self._runs:
            return torch.empty(0, dtype=torch.int64)
        return torch.from_numpy(np.concatenate([run.read() for run in self._runs], dtype=np.int64))


class _Run:
    """Elements of one width."""

    def __init__(self, elements: Sequence[Elements]) -> None:
        ends = np.cumsum([len(indices) for _, indices in elements])
        dtype = _BITS[elements[0][0].element_size()]
        self._found = torch.empty(int(ends[-1]), dtype=dtype).numpy()
        parts = np.split(self._found, ends[:-1])
        self._reads = [
            (flat.detach().view(dtype).numpy(), indices, part)
            for (flat, indices), part in zip(elements, parts, strict=True)
        ]

    def read(self) -> NDArray[np.signedinteger[Any]]:
        for flat, indices, part in self._reads:
            # The indices are our own; with "raise" NumPy would copy once more.
            np.take(flat, indices, out=part, mode="clip")
        return self._found


def _by_width(elements: Sequence[Elements]) -> list[list[Elements]]:
    return [list(found) for _, found in groupby(elements, key=lambda each: each[0].element_size())]


def _by_tensor(elements: Sequence[Elements]) -> list[tuple[torch.Tensor, list[Elements]]]:
    groups = (list(found) for _, found in groupby(elements, key=lambda each: id(each[0])))
    return [(found[0][0], found) for found in groups]
