"""Tensors packed into staging buckets, one bucket after the other, as the pieces that `ApplyBucket` names."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from math import prod

import torch

from refit_protocol.broadcast import BroadcastLayout
from refit_protocol.tensors import ITEM_BYTES, BucketPiece, TensorShape, aligned
from refit_trainer.errors import LayoutMismatch

ALIGNMENT_BYTES = 64
MAX_PLACES = 1 << 16
EXPECTED = "pass specs= where an iterator yields other tensors than the last one did, or than the engine has"


@dataclass
class FilledBucket:
    """Bucket number `bucket` holds `pieces`, `size_bytes` in all."""

    bucket: int
    pieces: list[BucketPiece] = field(default_factory=list)
    size_bytes: int = 0

    def holds_the_same(self, other: FilledBucket) -> bool:
        return self.bucket == other.bucket and self.pieces == other.pieces


class Placing:
    """Gives pieces their places: one behind the other, in `count` buckets in turn."""

    def __init__(self, count: int, bucket_bytes: int, max_pieces: int) -> None:
        self._count = count
        self._bucket_bytes = bucket_bytes
        self._max_pieces = max_pieces
        self.filled = FilledBucket(0)

    def of(self, tensor: TensorShape) -> Iterator[tuple[FilledBucket, BucketPiece]]:
        """The pieces of the tensor that comes next, each with its bucket: another one than before when that is full."""
        item_bytes = ITEM_BYTES[tensor.dtype]
        for first, count in _cuts(tensor, self._bucket_bytes):
            offset_bytes = aligned(self.filled.size_bytes, ALIGNMENT_BYTES)
            end_bytes = offset_bytes + count * item_bytes
            if len(self.filled.pieces) == self._max_pieces or end_bytes > self._bucket_bytes:
                self.filled = FilledBucket((self.filled.bucket + 1) % self._count)
                offset_bytes, end_bytes = 0, count * item_bytes
            piece = BucketPiece(name=tensor.name, first=first, count=count, offset_bytes=offset_bytes)
            self.filled.pieces.append(piece)
            self.filled.size_bytes = end_bytes
            yield self.filled, piece


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
    placing = Placing(len(buckets), buckets[0].numel(), max_pieces)
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


def _cuts(tensor: TensorShape, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """(first element, count) of every piece: one for a tensor that fits a bucket, else whole rows where a row fits."""
    elements, room = tensor.elements, bucket_bytes // ITEM_BYTES[tensor.dtype]
    if elements <= room:
        yield 0, elements
        return
    row_elements = prod(tensor.shape[1:])
    most = room - room % row_elements if row_elements <= room else room
    for first in range(0, elements, most):
        yield first, min(most, elements - first)


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
