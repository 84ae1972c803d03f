"""How tensors lie in the broadcasts of a collective refit: one stream of bytes, cut into pieces of one size.

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


@dataclass(frozen=True)
class BroadcastLayout:
    """Each tensor begins at the next multiple of 64 after the one before; the stream is cut every `bucket_bytes`, a
    multiple of 64, wherever that falls.
    """

    tensors: tuple[TensorShape, ...]
    bucket_bytes: int

    def __len__(self) -> int:
        """The number of broadcasts."""
        return -(-self.size_bytes // self.bucket_bytes)

    @cached_property
    def size_bytes(self) -> int:
        """Of the whole stream, padding included."""
        return sum(aligned(tensor.size_bytes, ALIGNMENT_BYTES) for tensor in self.tensors)

    @cached_property
    def buckets(self) -> Sequence[tuple[BucketPiece, ...]]:
        """The pieces of every broadcast, in the order of the stream; tensors without elements have none."""
        buckets: list[list[BucketPiece]] = [[] for _ in range(len(self))]
        for bucket, piece in self._pieces():
            buckets[bucket].append(piece)
        return [tuple(pieces) for pieces in buckets]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the names, dtypes and shapes as message pack, in hex: both sides must mean the same stream."""
        described = [[tensor.name, tensor.dtype.value, list(tensor.shape)] for tensor in self.tensors]
        return hashlib.sha256(msgspec.msgpack.encode(described)).hexdigest()

    def broadcast_bytes(self, bucket: int) -> int:
        """All are `bucket_bytes` long, except for the last one."""
        return min(self.bucket_bytes, self.size_bytes - bucket * self.bucket_bytes)

    def _pieces(self) -> Iterator[tuple[int, BucketPiece]]:
        begin = 0
        for tensor in self.tensors:
            item_bytes = ITEM_BYTES[tensor.dtype]
            end = begin + tensor.size_bytes
            at = begin
            while at < end:
                bucket, offset_bytes = divmod(at, self.bucket_bytes)
                count = (min(end, (bucket + 1) * self.bucket_bytes) - at) // item_bytes
                first = (at - begin) // item_bytes
                yield bucket, BucketPiece(name=tensor.name, first=first, count=count, offset_bytes=offset_bytes)
                at += count * item_bytes
            begin = aligned(end, ALIGNMENT_BYTES)
