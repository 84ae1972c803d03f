"""Checks that need the weights themselves: finite, equal where they must be, and arrived unchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.worker.copies import Copy, view_of
from refitd.worker.digest import as_bits, flat_index

CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class NamedCopy:
    """A copy and the checkpoint tensor it belongs to."""

    tensor: str
    copy: Copy


def check_finite(tensors: Iterable[tuple[str, torch.Tensor, torch.dtype]]) -> None:
    """Raises `not_finite` naming the tensors that are not finite in the engine's dtype."""
    bad = [name for name, tensor, dtype in tensors if not all(_finite(part, dtype) for part in _parts(tensor))]
    if bad:
        message = f"not finite in the engine's dtype: {', '.join(bad[:5])}"
        raise ProtocolError(ErrorCode.NOT_FINITE, message, tensors=bad[:100])


def check_same(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raises `manifest_mismatch` unless two tensors that share one parameter of the engine hold the same values."""
    same_memory = tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride()
    if not same_memory and not torch.equal(tensor, other):
        raise ProtocolError(
            ErrorCode.MANIFEST_MISMATCH,
            f"{name} differs from {other_name}, which the model ties it to; send them equal, or only {other_name}",
            different=[name],
        )


class SampledComparison:
    """Sampled elements of both sides of a set of copies, prepared so that a check costs two gathers per parameter.

    The samples are ordinals: the how-manieth element of the copy.
    """

    def __init__(self, sampled: Sequence[tuple[NamedCopy, NDArray[np.int64]]]) -> None:
        grouped: dict[tuple[int, int], list[tuple[NamedCopy, torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for named, ordinals in sampled:
            transfer, target = named.copy.transfer, named.copy.target
            indices = [
                torch.from_numpy(flat_index(box, ordinals)).to(target.device)
                for box in (transfer.source, transfer.target)
            ]
            grouped[id(named.copy.source), id(target)].append((named, indices[0], indices[1]))
        self._gathers = [
            (
                [named for named, _, _ in group],
                torch.cat([source for _, source, _ in group]),
                torch.cat([target for _, _, target in group]),
            )
            for group in grouped.values()
        ]

    def check(self) -> None:
        """Raises `attest_failed` naming tensors whose sampled elements did not arrive."""
        different: list[str] = []
        for group, source_indices, target_indices in self._gathers:
            source, target = group[0].copy.source, group[0].copy.target
            if not same_bits(source[source_indices].to(target.dtype), target[target_indices]):
                different.extend(named.tensor for named in group)
        _require_none(different)


def check_every_element(copies: Iterable[NamedCopy]) -> None:
    """Raises `attest_failed` naming the tensors that did not arrive bit for bit."""
    _require_none(different_tensors(copies))


def different_tensors(copies: Iterable[NamedCopy]) -> list[str]:
    return sorted({named.tensor for named in copies if not arrived(named.copy)})


def arrived(copy: Copy) -> bool:
    """Whether every target element holds its source element, cast to the target's dtype, bit for bit."""
    source = view_of(copy.source, copy.transfer.source)
    target = view_of(copy.target, copy.transfer.target)
    return all(
        same_bits(given.to(target.dtype), held) for given, held in zip(_parts(source), _parts(target), strict=True)
    )


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Slices along the first dimension of about CHUNK_ELEMENTS, so that temporaries stay small."""
    if tensor.dim() == 0 or tensor.numel() <= CHUNK_ELEMENTS:
        yield tensor
        return
    rows = max(tensor.shape[0] * CHUNK_ELEMENTS // tensor.numel(), 1)
    for row in range(0, tensor.shape[0], rows):
        yield tensor[row : row + rows]


def _finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool(torch.isfinite(tensor.to(dtype)).all())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(as_bits(one), as_bits(other))


def _require_none(different: Sequence[str]) -> None:
    if different:
        message = f"the engine does not hold what the trainer sent: {', '.join(different[:5])}"
        raise ProtocolError(ErrorCode.ATTEST_FAILED, message, tensors=list(different[:100]))
