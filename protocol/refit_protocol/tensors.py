"""Tensor and memory descriptors, and the arithmetic that proves them before anything is mapped or allocated."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from itertools import pairwise
from math import prod

import msgspec

from refit_protocol.errors import ErrorCode, ProtocolError

MAX_DIMENSIONS = 8
MAX_BYTES = 1 << 62
CUDA_IPC_HANDLE_BYTES = 64


class DType(StrEnum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"


ITEM_BYTES: dict[DType, int] = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
}
FLOAT_DTYPES = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


class _Descriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TensorShape(_Descriptor, frozen=True, kw_only=True):
    """A tensor by name, without memory: what a bucket refit announces and what the engine's manifest lists."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


class Shard(_Descriptor, frozen=True, kw_only=True):
    """Where a part lies in a tensor of shape `whole`: its first element has these `offsets`, one a dimension."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]


class SourceTensor(_Descriptor, frozen=True, kw_only=True):
    """A tensor inside segment number `segment`, at `offset_bytes`; `strides` count elements, None means row-major.

    With `shard` it is only a part of the tensor of that name; the rest lies with other ranks of the trainer.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    segment: int
    offset_bytes: int
    strides: tuple[int, ...] | None = None
    shard: Shard | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.shard is None else self.shard.whole

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def resolved_strides(self) -> tuple[int, ...]:
        return row_major_strides(self.shape) if self.strides is None else self.strides

    @property
    def span_bytes(self) -> int:
        """Bytes from the first to one past the last element touched."""
        if self.elements == 0:
            return 0
        steps = zip(self.shape, self.resolved_strides, strict=True)
        return (1 + sum((size - 1) * stride for size, stride in steps)) * ITEM_BYTES[self.dtype]


class MemfdSegment(_Descriptor, frozen=True, kw_only=True, tag="memfd", tag_field="kind"):
    """`size_bytes` of a memfd sealed against shrinking, at `/proc/<pid>/fd/<fd>`; `inode` guards against reuse."""

    pid: int
    fd: int
    inode: int
    size_bytes: int


class CudaIpcSegment(_Descriptor, frozen=True, kw_only=True, tag="cuda_ipc", tag_field="kind"):
    """One whole cudaMalloc allocation: the 64 bytes of cudaIpcGetMemHandle, on the device named by `device_uuid`.

    `event_handle` is the 64 bytes of an interprocess CUDA event that the trainer records before each commit, or None
    when the trainer synchronises its stream instead.
    """

    pid: int
    device_uuid: str
    handle: bytes
    size_bytes: int
    event_handle: bytes | None = None


Segment = MemfdSegment | CudaIpcSegment


class BucketPiece(_Descriptor, frozen=True, kw_only=True):
    """Elements `[first, first + count)` of tensor `name` in row-major order, lying in the bucket at `offset_bytes`."""

    name: str
    first: int
    count: int
    offset_bytes: int


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def aligned(offset_bytes: int, alignment_bytes: int) -> int:
    """The first multiple of `alignment_bytes` at or after `offset_bytes`."""
    return -(-offset_bytes // alignment_bytes) * alignment_bytes


def check_shape(tensor: TensorShape | SourceTensor) -> None:
    """Raises `invalid_descriptor` unless every size is in [0, 2^62) and so is the product."""
    if not tensor.name:
        raise _invalid("a tensor has an empty name")
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise _invalid(f"{tensor.name}: {len(tensor.shape)} dimensions, at most {MAX_DIMENSIONS} are allowed")
    if any(size < 0 for size in tensor.shape):
        raise _invalid(f"{tensor.name}: negative size in shape {list(tensor.shape)}")
    # A zero elsewhere in the shape must not hide a size that overflows.
    if prod(max(size, 1) for size in tensor.shape) * ITEM_BYTES[tensor.dtype] >= MAX_BYTES:
        raise _invalid(f"{tensor.name}: shape {list(tensor.shape)} is larger than any memory")


def check_unique(names: list[str]) -> None:
    """Raises `invalid_descriptor` naming the duplicates."""
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates:
        raise _invalid(f"duplicate tensor names: {', '.join(duplicates[:10])}", duplicates=duplicates[:100])


def check_segments(segments: list[Segment]) -> None:
    """Raises `invalid_descriptor` for segments that cannot exist, and for one named twice."""
    _check_handles_once(segments)
    for index, segment in enumerate(segments):
        if not 0 < segment.size_bytes < MAX_BYTES:
            raise _invalid(f"segment {index}: size {segment.size_bytes} bytes is not possible")
        if segment.pid <= 0:
            raise _invalid(f"segment {index}: pid {segment.pid} is not a process")
        if isinstance(segment, CudaIpcSegment):
            _check_cuda_handles(index, segment)
        elif segment.fd < 0 or segment.inode <= 0:
            raise _invalid(f"segment {index}: fd {segment.fd}, inode {segment.inode} is not an open memfd")


def check_source_tensors(tensors: list[SourceTensor], segments: list[Segment]) -> None:
    """Raises `invalid_descriptor` unless every tensor has a unique name and lies, aligned, inside its segment.

    Tensors may share memory (tied or sliced parameters); a tensor may not overlap itself.
    """
    check_unique([tensor.name for tensor in tensors])
    for tensor in tensors:
        check_shape(tensor)
        _check_shard(tensor)
        _check_strides(tensor)
        _check_inside(tensor, segments)


def check_pieces(pieces: list[BucketPiece], announced: dict[str, TensorShape], bucket_bytes: int) -> None:
    """Raises `invalid_descriptor` unless every piece is part of an announced tensor and none overlap in the bucket."""
    for piece in pieces:
        tensor = announced.get(piece.name)
        if tensor is None:
            raise _invalid(f"{piece.name}: not among the tensors announced by BeginRefit")
        _check_piece(piece, tensor, bucket_bytes)
    _check_no_overlap(pieces, announced)


def _check_piece(piece: BucketPiece, tensor: TensorShape, bucket_bytes: int) -> None:
    item_bytes = ITEM_BYTES[tensor.dtype]
    if piece.first < 0 or piece.count < 0 or piece.first + piece.count > tensor.elements:
        raise _invalid(
            f"{piece.name}: elements {piece.first}+{piece.count} are not inside its {tensor.elements} elements"
        )
    if piece.offset_bytes < 0 or piece.offset_bytes + piece.count * item_bytes > bucket_bytes:
        raise _invalid(f"{piece.name}: bytes at {piece.offset_bytes} are not inside the bucket of {bucket_bytes} bytes")
    if piece.offset_bytes % item_bytes:
        raise _invalid(f"{piece.name}: offset {piece.offset_bytes} is not a multiple of {item_bytes} bytes")


def _check_no_overlap(pieces: list[BucketPiece], announced: dict[str, TensorShape]) -> None:
    spans = sorted(
        (piece.offset_bytes, piece.offset_bytes + piece.count * ITEM_BYTES[announced[piece.name].dtype], piece.name)
        for piece in pieces
        if piece.count
    )
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise _invalid(f"{name} and {other} overlap in the bucket")


def _check_handles_once(segments: list[Segment]) -> None:
    first: dict[bytes, int] = {}
    for index, segment in enumerate(segments):
        if isinstance(segment, CudaIpcSegment) and first.setdefault(segment.handle, index) != index:
            raise _invalid(
                f"segment {index} has the handle of segment {first[segment.handle]}: one allocation, one segment"
            )


def _check_cuda_handles(index: int, segment: CudaIpcSegment) -> None:
    handles = {"handle": segment.handle, "event handle": segment.event_handle}
    for label, handle in handles.items():
        if handle is not None and len(handle) != CUDA_IPC_HANDLE_BYTES:
            raise _invalid(f"segment {index}: CUDA IPC {label} has {len(handle)} bytes, not {CUDA_IPC_HANDLE_BYTES}")


def _check_shard(tensor: SourceTensor) -> None:
    if tensor.shard is None:
        return
    whole, offsets = tensor.shard.whole, tensor.shard.offsets
    check_shape(TensorShape(name=tensor.name, dtype=tensor.dtype, shape=whole))
    if not len(whole) == len(offsets) == len(tensor.shape):
        raise _invalid(f"{tensor.name}: shape, offsets and whole differ in their dimensions")
    ends = [offset + size for offset, size in zip(offsets, tensor.shape, strict=True)]
    if any(offset < 0 for offset in offsets) or any(end > size for end, size in zip(ends, whole, strict=True)):
        raise _invalid(f"{tensor.name}: {list(tensor.shape)} at {list(offsets)} is not inside {list(whole)}")


def _check_strides(tensor: SourceTensor) -> None:
    if tensor.strides is None:
        return
    if len(tensor.strides) != len(tensor.shape):
        raise _invalid(f"{tensor.name}: {len(tensor.strides)} strides for {len(tensor.shape)} dimensions")
    if any(not 0 <= stride < MAX_BYTES for stride in tensor.strides):
        raise _invalid(f"{tensor.name}: strides {list(tensor.strides)} are not possible")
    if tensor.elements and _overlaps_itself(tensor.shape, tensor.strides):
        raise _invalid(f"{tensor.name}: strides {list(tensor.strides)} make the tensor overlap itself")


def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _check_inside(tensor: SourceTensor, segments: list[Segment]) -> None:
    if not 0 <= tensor.segment < len(segments):
        raise _invalid(f"{tensor.name}: segment {tensor.segment} of {len(segments)}")
    size_bytes = segments[tensor.segment].size_bytes
    if tensor.offset_bytes < 0 or tensor.offset_bytes + tensor.span_bytes > size_bytes:
        raise _invalid(
            f"{tensor.name}: {tensor.span_bytes} bytes at {tensor.offset_bytes} are not inside segment "
            f"{tensor.segment} of {size_bytes} bytes"
        )
    if tensor.offset_bytes % ITEM_BYTES[tensor.dtype]:
        raise _invalid(f"{tensor.name}: offset {tensor.offset_bytes} is not a multiple of its item size")


def _invalid(message: str, **details: object) -> ProtocolError:
    return ProtocolError(ErrorCode.INVALID_DESCRIPTOR, message, **details)
