"""Tensors packed into staging buckets, one bucket after the other, as the pieces that `ApplyBucket` names."""

from __future__ import annotations

import ctypes
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from math import prod
from typing import TypeAlias

import torch

from refit_protocol.broadcast import BroadcastLayout
from refit_protocol.tensors import ITEM_BYTES, BucketPiece, TensorShape, aligned
from refit_trainer.errors import LayoutMismatch

ALIGNMENT_BYTES = 64
MAX_PLACES = 1 << 16
# A tensor of more is cut where a bucket ends, between two units of no more.
CUT_BYTES = 1 << 20
# What a bucket may lack where the next tensor is not cut, or is cut between two units.
_SLACK_BYTES = 2 * CUT_BYTES
EXPECTED = "pass specs= where an iterator yields other tensors than the last one did, or than the engine has"


@dataclass
class FilledBucket:
    """Bucket number `bucket` holds `pieces`, `size_bytes` in all; `is_last`: no other one is packed behind it."""

    bucket: int
    pieces: list[BucketPiece] = field(default_factory=list)
    size_bytes: int = 0
    is_last: bool = False

    def holds_the_same(self, other: FilledBucket) -> bool:
        return self.bucket == other.bucket and self.pieces == other.pieces


Ahead: TypeAlias = Callable[[], Awaitable[Sequence[FilledBucket]]]
"""The buckets that are packed before the first one is read, once they are."""


class Placing:
    """Gives pieces their places: one behind the other, in `count` buckets in turn, each filled up to `fill_bytes`."""

    def __init__(self, count: int, fill_bytes: int, max_pieces: int) -> None:
        self._count = count
        self._fill_bytes = fill_bytes
        self._max_pieces = max_pieces
        self.filled = FilledBucket(0)

    def of(self, tensor: TensorShape) -> Iterator[tuple[FilledBucket, BucketPiece]]:
        """The pieces of the tensor that comes next, each with its bucket: another one than before when that is full."""
        item_bytes, unit = ITEM_BYTES[tensor.dtype], _unit_elements(tensor, self._fill_bytes)
        if not tensor.elements:
            yield self._placed(tensor.name, 0, 0, 0)
        first = 0
        while first < tensor.elements:
            left, room = tensor.elements - first, max(0, self._room_bytes // item_bytes)
            count = left if left <= room else room - room % unit
            if count:
                yield self._placed(tensor.name, first, count, count * item_bytes)
                first += count
            else:
                self._go_on()

    @property
    def _offset_bytes(self) -> int:
        return aligned(self.filled.size_bytes, ALIGNMENT_BYTES)

    @property
    def _room_bytes(self) -> int:
        return 0 if len(self.filled.pieces) == self._max_pieces else self._fill_bytes - self._offset_bytes

    def _placed(self, name: str, first: int, count: int, size_bytes: int) -> tuple[FilledBucket, BucketPiece]:
        if len(self.filled.pieces) == self._max_pieces:
            self._go_on()
        piece = BucketPiece(name=name, first=first, count=count, offset_bytes=self._offset_bytes)
        self.filled.pieces.append(piece)
        self.filled.size_bytes = piece.offset_bytes + size_bytes
        return self.filled, piece

    def _go_on(self) -> None:
        self.filled = FilledBucket((self.filled.bucket + 1) % self._count)


class Places:
    """Parts of `buckets` as typed tensors, each made once: trainers pack the same layout at every refit."""

    def __init__(self, buckets: Sequence[torch.Tensor]) -> None:
        self.buckets = buckets
        self._made: dict[tuple[int, int, torch.Size, torch.dtype], torch.Tensor] = {}

    def at(self, bucket: int, offset_bytes: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        key = bucket, offset_bytes, shape, dtype
        found = self._made.get(key)
        if found is None:
            size_bytes = shape.numel() * dtype.itemsize
            found = self.buckets[bucket][offset_bytes : offset_bytes + size_bytes].view(dtype).view(shape)
            if len(self._made) >= MAX_PLACES:
                self._made.clear()
            self._made[key] = found
        return found


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    announced: Mapping[str, TensorShape],
    buckets: Sequence[torch.Tensor],
    max_pieces: int,
    places: Places | None = None,
) -> Iterator[FilledBucket]:
    """Fills `buckets` (flat uint8 tensors of one size) in turn and yields each when it is full, the last one as it is.

    `tensors` is consumed no further than the bucket in hand. A bucket is written again when the iterator is advanced
    for the `len(buckets)`-th time: by then the daemon must have read it. Raises `LayoutMismatch` unless exactly the
    announced tensors come, each once. `places` keeps what is made of `buckets` from one refit to the next.
    """
    places = places or Places(buckets)
    missing = dict(announced)
    placing = Placing(len(buckets), fill_bytes(announced.values(), buckets[0].numel(), len(buckets)), max_pieces)
    filled = placing.filled
    for name, tensor in tensors:
        expected = _check_announced(name, tensor, announced, missing)
        tensor = tensor.detach()
        for following, piece in placing.of(expected):
            if following is not filled:
                yield filled
                filled = following
            copy_piece(tensor, piece, places, filled.bucket)
    if missing:
        raise _missing([*missing])
    filled.is_last = True
    yield filled


def copy_piece(tensor: torch.Tensor, piece: BucketPiece, places: Places, bucket: int) -> None:
    """To its place in that bucket; the tensor, which is detached, may be strided."""
    if piece.count == tensor.numel():
        _copy(tensor, places.at(bucket, piece.offset_bytes, tensor.shape, tensor.dtype))
    else:
        part = torch.Size((piece.count,))
        copy_range(tensor, piece.first, places.at(bucket, piece.offset_bytes, part, tensor.dtype))


@dataclass(frozen=True)
class PackedBroadcast:
    """The bytes of one broadcast. `in_buffer`: packed into a buffer, else where the trainer has them."""

    view: torch.Tensor
    in_buffer: bool


def pack_broadcasts(
    tensors: Iterator[tuple[str, torch.Tensor]], layout: BroadcastLayout, buffers: Sequence[torch.Tensor]
) -> Iterator[PackedBroadcast]:
    """Yields the bytes of each broadcast: packed into one of the `buffers` in turn when it is asked for, or the very
    memory of a tensor that has it alone. Raises `LayoutMismatch` unless the layout's tensors come, all in its order.
    """
    expected = iter(layout.tensors)
    turns = cycle(buffers)
    buffer = next(turns)
    name, tensor = "", torch.empty(0)
    for broadcast in layout.broadcasts:
        in_buffer = True
        for piece in broadcast.pieces:
            while name != piece.name:
                name, tensor = _next_in_order(tensors, next(expected))
            if len(broadcast.pieces) == 1 and tensor.is_contiguous() and tensor.device == buffer.device:
                view = tensor.view(-1)[piece.first : piece.first + piece.count].view(torch.uint8)
                in_buffer = False
                break
            view = buffer[: broadcast.size_bytes]
            target = view[piece.offset_bytes : piece.offset_bytes + piece.count * tensor.element_size()]
            copy_range(tensor, piece.first, target.view(tensor.dtype))
        yield PackedBroadcast(view, in_buffer)
        if in_buffer:
            buffer = next(turns)
    for shape in expected:
        _next_in_order(tensors, shape)
    if (extra := next(tensors, None)) is not None:
        raise LayoutMismatch(f"{extra[0]} is not expected: {EXPECTED}")


def _next_in_order(tensors: Iterator[tuple[str, torch.Tensor]], expected: TensorShape) -> tuple[str, torch.Tensor]:
    named = next(tensors, None)
    if named is None:
        raise _missing([expected.name])
    name, tensor = named
    if name != expected.name:
        raise LayoutMismatch(f"{name} comes where {expected.name} is expected: pass specs= in the tensors' order")
    _check_shape(name, tensor, expected)
    return name, tensor.detach()


def copy_range(tensor: torch.Tensor, first: int, flat: torch.Tensor) -> None:
    """Copies the elements `[first, first + len(flat))` in row-major order into `flat`; the tensor may be strided."""
    count = flat.numel()
    if tensor.is_contiguous():
        _copy(tensor.view(-1)[first : first + count], flat)
    elif count == tensor.numel():
        _copy(tensor, flat.view(tensor.shape))
    else:
        _copy_rows(tensor, first, flat)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Runs on the CPU by the calling thread alone: PyTorch's threads would fight the engine's for its cores.

    By address there, since views cost more than the bytes of an expert of a small model, and models have thousands.
    """
    if source.is_cpu and target.is_cpu and source.is_contiguous():
        assert target.is_contiguous(), "places lie in flat buckets"
        assert (target.dtype, target.numel()) == (source.dtype, source.numel()), "places are made for their tensors"
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


def _copy_rows(tensor: torch.Tensor, first: int, flat: torch.Tensor) -> None:
    row_elements = prod(tensor.shape[1:])
    done = 0
    while done < flat.numel():
        index, inside = divmod(first + done, row_elements)
        rows = 0 if inside else (flat.numel() - done) // row_elements
        if rows:
            target = flat[done : done + rows * row_elements]
            target.view(rows, *tensor.shape[1:]).copy_(tensor[index : index + rows])
        else:
            target = flat[done : done + row_elements - inside]
            copy_range(tensor[index], inside, target)
        done += target.numel()


def share_bytes(tensors: Iterable[TensorShape], count: int) -> int:
    """How large `count` buckets have to be to hold all tensors together; so few that one would do are not divided."""
    needed_bytes = max(_needed_bytes(tensors), ALIGNMENT_BYTES)
    if needed_bytes <= 2 * count * _SLACK_BYTES:
        return needed_bytes
    return aligned(-(-needed_bytes // count) + _SLACK_BYTES, ALIGNMENT_BYTES)


def fill_bytes(tensors: Iterable[TensorShape], bucket_bytes: int, count: int) -> int:
    """How far to fill each of `count` buckets so that they are filled alike, and all of them equally often: a last one
    that holds next to nothing costs a whole turn."""
    needed_bytes = _needed_bytes(tensors)
    if needed_bytes <= bucket_bytes or bucket_bytes <= 2 * _SLACK_BYTES:
        return bucket_bytes
    fillings = -(-needed_bytes // (bucket_bytes - _SLACK_BYTES))
    fillings = -(-fillings // count) * count
    return min(bucket_bytes, aligned(needed_bytes // fillings + _SLACK_BYTES, ALIGNMENT_BYTES))


def _needed_bytes(tensors: Iterable[TensorShape]) -> int:
    return sum(aligned(tensor.size_bytes, ALIGNMENT_BYTES) for tensor in tensors)


def _unit_elements(tensor: TensorShape, most_bytes: int) -> int:
    """What of a tensor stays together: all of it if it is small, else as many rows as are; single elements where even
    those do not fit `most_bytes`."""
    item_bytes = ITEM_BYTES[tensor.dtype]
    bounds_bytes = min(CUT_BYTES, most_bytes)
    sizes = [prod(tensor.shape[axis:]) for axis in range(len(tensor.shape) + 1)]
    return next((size for size in sizes if 0 < size * item_bytes <= bounds_bytes), 1)


def _check_announced(
    name: str, tensor: torch.Tensor, announced: Mapping[str, TensorShape], missing: dict[str, TensorShape]
) -> TensorShape:
    expected = missing.pop(name, None)
    if expected is None:
        raise LayoutMismatch(
            f"{name} comes a second time" if name in announced else f"{name} is not expected: {EXPECTED}"
        )
    _check_shape(name, tensor, expected)
    return expected


def _check_shape(name: str, tensor: torch.Tensor, expected: TensorShape) -> None:
    dtype = _name_of(tensor.dtype)
    if tensor.shape != expected.shape or dtype != expected.dtype:
        raise LayoutMismatch(
            f"{name} is {dtype} {list(tensor.shape)}, "
            f"but {expected.dtype} {list(expected.shape)} is expected: {EXPECTED}"
        )


def _missing(names: list[str]) -> LayoutMismatch:
    return LayoutMismatch(f"the tensors ended without {_listed(names)}: {EXPECTED}", details={"missing": names})


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
