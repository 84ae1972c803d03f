"""Checks that need the weights themselves: finite, equal where they must be, and arrived unchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.worker.copies import Copy, view_of
from refitd.worker.digest import as_bits, bits_of, flat_index, from_bits
from refitd.worker.gather import gather
from refitd.worker.readback import read_back

if TYPE_CHECKING:
    from refitd.worker.cuda_digest import DeviceComparison

CHUNK_ELEMENTS = 1 << 22


class Attest(StrEnum):
    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


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
    if not shares_memory(tensor, other) and not torch.equal(tensor, other):
        raise ProtocolError(
            ErrorCode.MANIFEST_MISMATCH,
            f"{name} differs from {other_name}, which the model ties it to; send them equal, or only {other_name}",
            different=[name],
        )


def shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two tensors of one shape and dtype: whether they are the same, whatever they hold."""
    return tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride()


class SampledComparison:
    """Sampled elements of both sides of a set of copies, prepared so that a check costs two gathers for each pair of
    dtypes.

    The samples are ordinals: the how-manieth element of the copy.
    """

    def __init__(self, sampled: Sequence[tuple[NamedCopy, NDArray[np.int64]]]) -> None:
        grouped: dict[tuple[torch.dtype, torch.dtype], list[tuple[NamedCopy, NDArray[np.int64]]]] = defaultdict(list)
        for named, ordinals in sampled:
            grouped[named.copy.source.dtype, named.copy.target.dtype].append((named, ordinals))
        self._pairs = [_SampledPair(group) for group in grouped.values()]

    def begin(self) -> Callable[[], None]:
        """Enqueues the reads; what is returned raises `attest_failed` naming tensors whose samples did not arrive."""
        masks = [pair.unequal() for pair in self._pairs]
        found = [read_back(mask.any()) for mask in masks]

        def check() -> None:
            unequal = [(pair, mask) for pair, mask, some in zip(self._pairs, masks, found, strict=True) if some()]
            _require_none([name for pair, mask in unequal for name in pair.names(mask)])

        return check


class _SampledPair:
    """Samples of copies between two dtypes."""

    def __init__(self, sampled: Sequence[tuple[NamedCopy, NDArray[np.int64]]]) -> None:
        first = sampled[0][0].copy
        self._dtypes = first.source.dtype, first.target.dtype
        self._names = np.repeat([named.tensor for named, _ in sampled], [len(ordinals) for _, ordinals in sampled])
        self._source = gather(
            [(named.copy.source, flat_index(named.copy.transfer.source, ordinals)) for named, ordinals in sampled]
        )
        self._target = gather(
            [(named.copy.target, flat_index(named.copy.transfer.target, ordinals)) for named, ordinals in sampled]
        )

    def unequal(self) -> torch.Tensor:
        """Of each sample, whether the two sides differ."""
        given, wanted = self._dtypes
        sent = self._source.bits()
        if given != wanted:
            sent = bits_of(from_bits(sent, given).to(wanted))
        return sent != self._target.bits()

    def names(self, unequal: torch.Tensor) -> list[str]:
        """The tensors of these samples."""
        return sorted(set(self._names[unequal.cpu().numpy()].tolist()))


class FullComparison:
    """Every element of both sides of a set of copies; prepared at its first use."""

    def __init__(self, copies: Sequence[NamedCopy]) -> None:
        self._copies = copies
        self._on_device: DeviceComparison | None = None

    def check(self) -> None:
        """Raises `attest_failed` naming the tensors that did not arrive bit for bit."""
        plain, others = _on_device_and_others(self._copies)
        if plain and self._on_device is None:
            self._on_device = _device_comparison(plain)
        different = self._on_device.different() if self._on_device is not None else []
        _require_none(sorted({*different, *(named.tensor for named in others if not arrived(named.copy))}))


def different_tensors(copies: Sequence[NamedCopy]) -> list[str]:
    plain, others = _on_device_and_others(copies)
    different = _device_comparison(plain).different() if plain else []
    return sorted({*different, *(named.tensor for named in others if not arrived(named.copy))})


def _on_device_and_others(copies: Iterable[NamedCopy]) -> tuple[list[NamedCopy], list[NamedCopy]]:
    """Those that a kernel can compare, and the rest."""
    plain: list[NamedCopy] = []
    others: list[NamedCopy] = []
    for named in copies:
        same = named.copy.source.dtype == named.copy.target.dtype
        (plain if same and named.copy.target.is_cuda else others).append(named)
    return plain, others


def _device_comparison(copies: Sequence[NamedCopy]) -> DeviceComparison:
    # CuPy is only there where the engine runs on a GPU.
    from refitd.worker.cuda_digest import DeviceComparison

    return DeviceComparison([(named.tensor, named.copy) for named in copies], copies[0].copy.target.device)


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
    """Of tensors with the same shape and dtype."""
    return all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(_parts(one), _parts(other), strict=True))


def _require_none(different: Sequence[str]) -> None:
    if different:
        message = f"the engine does not hold what the trainer sent: {', '.join(different[:5])}"
        raise ProtocolError(ErrorCode.ATTEST_FAILED, message, tensors=list(different[:100]))
