"""How tensors lie in the broadcasts of a collective refit.

Both sides compute the same layout from what `BeginRefit` announced, so nothing about it travels with the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from refit_protocol.tensors import ITEM_BYTES, BucketPiece, TensorShape, aligned

ALIGNMENT_BYTES = 64
# Of a full broadcast: copying less into one than this costs less than a broadcast more.
ALONE_PARTS = 16


@dataclass(frozen=True)
class Broadcast:
    """`size_bytes` that hold `pieces`, which do not overlap."""

    pieces: tuple[BucketPiece, ...]
    size_bytes: int


@dataclass(frozen=True)
class BroadcastLayout:
    """The tensors in their order, in broadcasts of at most `bucket_bytes`, which is a multiple of 64.

    A tensor of a sixteenth of that or more has broadcasts of its own, so that it can be sent from where it lies: all
    but the last of them full. Others are put together, each at the next multiple of 64; one that does not fit any more
    begins the next broadcast. Tensors without elements are in none.
    """

    tensors: tuple[TensorShape, ...]
    bucket_bytes: int

    def of(self, tensors: tuple[TensorShape, ...]) -> BroadcastLayout:
        """This very layout if it is of these tensors, for working it out takes a while; else theirs."""
        return self if tensors == self.tensors else BroadcastLayout(tensors, self.bucket_bytes)

    @cached_property
    def broadcasts(self) -> Sequence[Broadcast]:
        return list(self._broadcasts())

    @cached_property
    def size_bytes(self) -> int:
        """Of all broadcasts together, padding included."""
        return sum(broadcast.size_bytes for broadcast in self.broadcasts)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the names, dtypes and shapes as message pack, in hex: both sides must mean the same tensors."""
        described = [[tensor.name, tensor.dtype.value, list(tensor.shape)] for tensor in self.tensors]
        return hashlib.sha256(msgspec.msgpack.encode(described)).hexdigest()

    def _broadcasts(self) -> Iterator[Broadcast]:
        pieces: list[BucketPiece] = []
        used_bytes = 0
        for tensor in self.tensors:
            begin = aligned(used_bytes, ALIGNMENT_BYTES)
            stands_alone = ALONE_PARTS * tensor.size_bytes >= self.bucket_bytes
            if pieces and (stands_alone or begin + tensor.size_bytes > self.bucket_bytes):
                yield Broadcast(tuple(pieces), used_bytes)
                pieces, used_bytes, begin = [], 0, 0
            if stands_alone:
                yield from self._cut(tensor)
            elif tensor.elements:
                pieces.append(BucketPiece(name=tensor.name, first=0, count=tensor.elements, offset_bytes=begin))
                used_bytes = begin + tensor.size_bytes
        if pieces:
            yield Broadcast(tuple(pieces), used_bytes)

    def _cut(self, tensor: TensorShape) -> Iterator[Broadcast]:
        item_bytes = ITEM_BYTES[tensor.dtype]
        most = self.bucket_bytes // item_bytes
        for first in range(0, tensor.elements, most):
            count = min(most, tensor.elements - first)
            piece = BucketPiece(name=tensor.name, first=first, count=count, offset_bytes=0)
            yield Broadcast((piece,), count * item_bytes)
