"""The digest of what the engine serves, read from its memory through the plan; `refit_protocol.digest` defines it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from refit_protocol.digest import MASK, DigestMode, element_weights, lane_weights, run_sum, sampled_positions, to_hex
from refitd.worker.boxes import Box
from refitd.worker.gather import gather
from refitd.worker.plan import Route
from refitd.worker.readback import read_back
from refitd.worker.weights import EngineWeights

if TYPE_CHECKING:
    from refitd.worker.cuda_digest import DeviceDigest

CHUNK_ELEMENTS = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Sample:
    """The sampled elements of one route: row-major indices in the tensor, and which elements of the route those are."""

    route: Route
    positions: NDArray[np.int64]
    ordinals: NDArray[np.int64]

    @property
    def targets(self) -> NDArray[np.int64]:
        """Indices in the flat parameter."""
        return flat_index(self.route.transfer.target, self.ordinals)


class DigestReader:
    """Prepared once per plan, so that a sampled digest costs one gather per parameter."""

    def __init__(self, weights: EngineWeights) -> None:
        self.plan = weights.plan
        self._weights = weights
        self._groups = _groups(weights, [route for routes in self.plan.routes.values() for route in routes])
        self._sampled = {key: _SampledSum(weights, routes) for key, routes in self._groups.items()}
        self._device_digest: DeviceDigest | None = None

    def parts(self, mode: DigestMode) -> dict[str, str]:
        """The digest of this rank, one part for each set of elements that other ranks may hold too; see
        `combine_parts`."""
        return self.begin(mode)()

    def begin(self, mode: DigestMode) -> Callable[[], dict[str, str]]:
        """Enqueues the reads; what is returned gives the parts."""
        if mode is DigestMode.SAMPLED:
            sums = {key: part.begin() for key, part in self._sampled.items()}
        elif self._weights.device.type == "cuda":
            sums = self._on_device().begin()
        else:
            parts = {key: to_hex(sum(map(self._route_sum, routes))) for key, routes in self._groups.items()}
            return lambda: parts
        numbers = {key: read_back(value) for key, value in sums.items()}
        return lambda: {key: to_hex(number()) for key, number in numbers.items()}

    def _route_sum(self, route: Route) -> int:
        return route_sum(route, self._weights.flat(route.parameter))

    def _on_device(self) -> DeviceDigest:
        if self._device_digest is None:
            # CuPy is only there where the engine runs on a GPU.
            from refitd.worker.cuda_digest import DeviceDigest

            groups = {
                key: [(route, self._weights.flat(route.parameter)) for route in routes]
                for key, routes in self._groups.items()
            }
            self._device_digest = DeviceDigest(groups, self._weights.device)
        return self._device_digest


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The elements' bits as signed integers, in int64."""
    return as_bits(values).to(torch.int64)


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """The elements' bits as signed integers of the same width, sharing memory."""
    return values.view(_BITS[values.element_size()])


def from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `bits_of`."""
    return bits.to(_BITS[dtype.itemsize]).view(dtype)


def samples(weights: EngineWeights, routes: Iterable[Route]) -> list[Sample]:
    """Of the routes that hold at least one sampled element."""
    found = []
    for route in routes:
        positions = sampled_positions(route.tensor, prod(weights.expected[route.tensor].shape))
        inside, ordinals = _ordinals(positions, route.transfer.source)
        if len(ordinals):
            found.append(Sample(route, positions[inside], ordinals))
    return found


def flat_index(box: Box, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the how-manieth elements of a box lie."""
    indices = np.full(len(ordinals), box.offset, dtype=np.int64)
    for size, stride in zip(reversed(box.sizes), reversed(box.strides), strict=True):
        ordinals, index = np.divmod(ordinals, size)
        indices += index * stride
    return indices


def route_sum(route: Route, flat: torch.Tensor) -> int:
    """The full digest of the elements of one route."""
    source, target = route.transfer.source, route.transfer.target
    if source.is_run and target.is_run:
        return _run_sum(route.tensor, source, flat[target.offset : target.offset + target.elements])
    total = 0
    rows = max(CHUNK_ELEMENTS * source.sizes[0] // source.elements, 1)
    for row in range(0, source.sizes[0], rows):
        count = min(rows, source.sizes[0] - row)
        factors = torch.from_numpy(element_weights(route.tensor, _indices(_rows(source, row, count))))
        part = _rows(target, row, count)
        values = flat.as_strided(part.sizes, part.strides, flat.storage_offset() + part.offset)
        total += int((bits_of(values.contiguous()).view(-1) * factors.to(flat.device)).sum())
    return total & MASK


class _SampledSum:
    """One gather, then one weighted sum."""

    def __init__(self, weights: EngineWeights, routes: Iterable[Route]) -> None:
        by_parameter: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples(weights, routes):
            by_parameter[sample.route.parameter].append(sample)
        self._gather = gather(
            [
                (weights.flat(name), np.concatenate([sample.targets for sample in found]))
                for name, found in by_parameter.items()
            ]
        )
        factors = [
            element_weights(sample.route.tensor, sample.positions)
            for found in by_parameter.values()
            for sample in found
        ]
        self._factors = _to_device(np.concatenate(factors or [np.empty(0, dtype=np.int64)]), weights.device)

    def begin(self) -> torch.Tensor:
        """Modulo 2^64, on its way."""
        return (self._gather.bits().to(self._factors.device) * self._factors).sum()


def _groups(weights: EngineWeights, routes: Iterable[Route]) -> Mapping[str, list[Route]]:
    """Routes that take the same fraction of their tensors, under a key that names exactly these elements.

    What is replicated between ranks is then replicated group by group; what only single pipeline stages share, such as
    a tied embedding, is a group of its own.
    """
    by_fraction: dict[tuple[float, float, str], list[Route]] = defaultdict(list)
    for route in routes:
        whole = prod(weights.expected[route.tensor].shape)
        source = route.transfer.source
        alone = route.parameter if route.parameter in weights.on_several_stages else ""
        by_fraction[source.offset / whole, source.elements / whole, alone].append(route)
    return {_key(found): found for found in by_fraction.values()}


def _key(routes: Iterable[Route]) -> str:
    regions = sorted(f"{route.tensor} {route.transfer.source}" for route in routes)
    return hashlib.sha256("\n".join(regions).encode()).hexdigest()[:16]


def _run_sum(tensor: str, source: Box, values: torch.Tensor) -> int:
    lanes = _to_device(lane_weights(), values.device)
    return sum(
        run_sum(
            tensor,
            source.offset + start,
            bits_of(values[start : start + CHUNK_ELEMENTS]),
            lanes,
            lambda array: _to_device(array, values.device),
        )
        for start in range(0, values.shape[0], CHUNK_ELEMENTS)
    )


def _ordinals(positions: NDArray[np.int64], box: Box) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which positions lie in the box, and the how-manieth of its elements those are."""
    rest = positions - box.offset
    inside = rest >= 0
    ordinals = np.zeros(len(positions), dtype=np.int64)
    for size, stride in zip(box.sizes, box.strides, strict=True):
        index, rest = np.divmod(rest, stride)
        inside &= index < size
        ordinals = ordinals * size + index
    inside &= rest == 0
    return inside, ordinals[inside]


def _indices(box: Box) -> NDArray[np.int64]:
    return flat_index(box, np.arange(box.elements, dtype=np.int64))


def _rows(box: Box, row: int, count: int) -> Box:
    return Box(box.offset + row * box.strides[0], (count, *box.sizes[1:]), box.strides)


def _to_device(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
