"""Strided boxes of elements, and the arithmetic of a plan: merge dimensions, clip to a range, follow other strides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod

from refit_protocol.tensors import row_major_strides


@dataclass(frozen=True)
class Box:
    """The elements at `offset + sum(i_d * strides[d])` for every index `i` below `sizes`; all counted in elements."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    @property
    def span(self) -> int:
        """Elements from the first to one past the last; the box must not be empty."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    @property
    def is_run(self) -> bool:
        """Whether the elements are consecutive and in order."""
        return not self.sizes or (len(self.sizes) == 1 and self.strides[0] == 1)

    def moved(self, elements: int) -> Box:
        return Box(self.offset + elements, self.sizes, self.strides)


@dataclass(frozen=True)
class Transfer:
    """Copies each element of `source` to the element of `target` with the same index; both have the same sizes."""

    source: Box
    target: Box

    @property
    def elements(self) -> int:
        return self.source.elements

    def merged(self) -> Transfer:
        """The same copy with as few dimensions as possible, the slowest of the source first."""
        dims = sorted(
            (
                dim
                for dim in zip(self.source.strides, self.target.strides, self.source.sizes, strict=True)
                if dim[2] != 1
            ),
            key=lambda dim: dim[:2],
            reverse=True,
        )
        kept: list[tuple[int, int, int]] = []
        for source_stride, target_stride, size in dims:
            outer = kept[-1] if kept else None
            if outer and outer[0] == size * source_stride and outer[1] == size * target_stride:
                kept[-1] = (source_stride, target_stride, outer[2] * size)
            else:
                kept.append((source_stride, target_stride, size))
        sizes = tuple(dim[2] for dim in kept)
        return Transfer(
            Box(self.source.offset, sizes, tuple(dim[0] for dim in kept)),
            Box(self.target.offset, sizes, tuple(dim[1] for dim in kept)),
        )

    def clipped(self, first: int, end: int) -> list[Transfer]:
        """The part whose source elements lie in `[first, end)`, as few boxes; only if merged and `can_clip`."""
        lower, upper = first - self.source.offset, end - self.source.offset
        return [
            self._part(starts, sizes) for starts, sizes in _clip(self.source.sizes, self.source.strides, lower, upper)
        ]

    @property
    def can_clip(self) -> bool:
        """Whether a step of an outer dimension always leaves the inner ones behind, so that a range meets few boxes."""
        sizes, strides = self.source.sizes, self.source.strides
        return all(Box(0, sizes[d + 1 :], strides[d + 1 :]).span <= strides[d] for d in range(len(sizes)))

    def _part(self, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Transfer:
        return Transfer(_sub_box(self.source, starts, sizes), _sub_box(self.target, starts, sizes)).merged()


def follow_strides(box: Box, shape: tuple[int, ...], strides: tuple[int, ...]) -> Box | None:
    """`box` counts row-major elements of a tensor of `shape`; returns the same elements, in the same order, of a tensor
    with these `strides`. None where they cannot be reached by one box."""
    steps = row_major_strides(shape)
    if strides == steps:
        return box
    start = tuple(box.offset // step % max(size, 1) for step, size in zip(steps, shape, strict=True))
    dims: list[tuple[int, int]] = []
    for size, stride in zip(box.sizes, box.strides, strict=True):
        found = _follow_dimension(size, stride, start, shape, strides)
        if found is None:
            return None
        dims.extend(found)
    if len(dims) != len(box.sizes):
        return None
    offset = sum(index * stride for index, stride in zip(start, strides, strict=True))
    return Box(offset, tuple(size for size, _ in dims), tuple(stride for _, stride in dims))


def clip_to_region(
    transfer: Transfer, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> list[Transfer] | None:
    """The part of a copy from a tensor of `shape` whose source elements lie in a region of it, `sizes` at `offsets`;
    nothing where there are none. None where the copy does not go along the tensor's dimensions."""
    split = split_like(transfer, shape)
    steps = row_major_strides(shape)
    start = tuple(split.source.offset // step % max(size, 1) for step, size in zip(steps, shape, strict=True))
    kept: list[range] = []
    walked: list[int] = []
    for size, stride in zip(split.source.sizes, split.source.strides, strict=True):
        if size == 1:
            kept.append(range(1))
            continue
        dimension = _dimension_walked(size, stride, start, shape)
        if dimension is None or dimension in walked:
            return None
        walked.append(dimension)
        region = range(offsets[dimension], offsets[dimension] + sizes[dimension])
        kept.append(_steps_inside(start[dimension], stride // steps[dimension], size, region))
    standing = (d for d in range(len(shape)) if d not in walked)
    if not all(kept) or not all(offsets[d] <= start[d] < offsets[d] + sizes[d] for d in standing):
        return []
    starts, lengths = tuple(part.start for part in kept), tuple(len(part) for part in kept)
    return [Transfer(_sub_box(split.source, starts, lengths), _sub_box(split.target, starts, lengths))]


def split_like(transfer: Transfer, shape: tuple[int, ...]) -> Transfer:
    """The same copy with merged dimensions taken apart again wherever they run over several dimensions of `shape`."""
    steps = row_major_strides(shape)
    sizes: list[int] = []
    source: list[int] = []
    target: list[int] = []
    for size, step, target_step in zip(
        transfer.source.sizes, transfer.source.strides, transfer.target.strides, strict=True
    ):
        for part_size, factor in _split_size(size, step, shape, steps):
            sizes.append(part_size)
            source.append(step * factor)
            target.append(target_step * factor)
    whole = tuple(sizes)
    return Transfer(
        Box(transfer.source.offset, whole, tuple(source)), Box(transfer.target.offset, whole, tuple(target))
    )


def _split_size(size: int, step: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> list[tuple[int, int]]:
    """(size, multiple of step) of the parts, slowest first."""
    parts: list[tuple[int, int]] = []
    factor = 1
    for extent, extent_step in reversed(list(zip(shape, steps, strict=True))):
        if extent_step == step * factor and extent > 1 and size % extent == 0 and size > extent:
            parts.append((extent, factor))
            factor *= extent
            size //= extent
    return [(size, factor), *reversed(parts)]


def _dimension_walked(size: int, stride: int, start: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """The one dimension of a row-major tensor along which `size` steps of `stride` elements from `start` lead."""
    for dimension, (index, extent, step) in enumerate(zip(start, shape, row_major_strides(shape), strict=True)):
        if stride > 0 and stride % step == 0 and index + (size - 1) * (stride // step) < extent:
            return dimension
    return None


def _steps_inside(start: int, pace: int, count: int, region: range) -> range:
    """Which of the indices `start + i * pace`, `i` below `count`, lie in the region."""
    first = max(-((start - region.start) // pace), 0)
    end = min(-((start - region.stop) // pace), count)
    return range(first, max(first, end))


def _follow_dimension(
    size: int, step: int, start: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> list[tuple[int, int]] | None:
    if size == 1:
        return [(1, 0)]
    for index, extent, row_step, stride in zip(start, shape, row_major_strides(shape), strides, strict=True):
        if extent > 1 and step % row_step == 0 and index + (size - 1) * (step // row_step) < extent:
            return [(size, step // row_step * stride)]
    return None


def _clip(
    sizes: tuple[int, ...], strides: tuple[int, ...], lower: int, upper: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(starts, sizes) of sub-boxes that hold the elements at distance `[lower, upper)` from the box's first."""
    if not sizes:
        if lower <= 0 < upper:
            yield (), ()
        return
    size, stride = sizes[0], strides[0]
    span = Box(0, sizes[1:], strides[1:]).span
    touched = range(max((lower - span) // stride + 1, 0), min(-(-upper // stride), size))
    whole = range(max(-(-lower // stride), 0), min((upper - span) // stride + 1, size))
    if len(whole):
        yield (whole.start, *(0 for _ in sizes[1:])), (len(whole), *sizes[1:])
    for row in _outside(touched, whole):
        for starts, inner in _clip(sizes[1:], strides[1:], lower - row * stride, upper - row * stride):
            yield (row, *starts), (1, *inner)


def _outside(rows: range, middle: range) -> Iterator[int]:
    """`rows` without those in `middle`, of which there may be billions."""
    if not len(middle):
        return iter(rows)
    return chain(range(rows.start, middle.start), range(middle.stop, rows.stop))


def _sub_box(box: Box, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    offset = box.offset + sum(start * stride for start, stride in zip(starts, box.strides, strict=True))
    return Box(offset, sizes, box.strides)
