"""Descriptor arithmetic against a model that simply lists every byte."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import (
    ITEM_BYTES,
    BucketPiece,
    CudaIpcSegment,
    DType,
    MemfdSegment,
    Segment,
    SourceTensor,
    TensorShape,
    aligned,
    check_pieces,
    check_segments,
    check_shape,
    check_source_tensors,
    row_major_strides,
)

SMALL = st.integers(-1, 4)
SMALL_DTYPES = st.sampled_from([DType.INT8, DType.BFLOAT16, DType.FLOAT32])


def memfd(size_bytes: int) -> MemfdSegment:
    return MemfdSegment(pid=1, fd=3, inode=4, size_bytes=size_bytes)


def touched(tensor: SourceTensor) -> list[int]:
    """The first byte of every element, as often as it is touched."""
    item = ITEM_BYTES[tensor.dtype]
    strides = tensor.resolved_strides
    return [
        tensor.offset_bytes + item * sum(index * stride for index, stride in zip(at, strides, strict=True))
        for at in product(*map(range, tensor.shape))
    ]


def is_right(tensor: SourceTensor, size_bytes: int) -> bool:
    item = ITEM_BYTES[tensor.dtype]
    if tensor.strides is not None and len(tensor.strides) != len(tensor.shape):
        return False
    if any(size < 0 for size in tensor.shape) or any(stride < 0 for stride in tensor.strides or ()):
        return False
    starts = touched(tensor)
    inside = all(start >= 0 and start + item <= size_bytes for start in starts)
    aligned_there = tensor.offset_bytes % item == 0 and 0 <= tensor.offset_bytes <= size_bytes
    return inside and aligned_there and len(set(starts)) == len(starts)


def accepted(tensor: SourceTensor, segments: list[Segment]) -> bool:
    try:
        check_source_tensors([tensor], segments)
    except ProtocolError:
        return False
    return True


@given(
    st.builds(
        SourceTensor,
        name=st.just("w"),
        dtype=SMALL_DTYPES,
        shape=st.lists(SMALL, max_size=3).map(tuple),
        strides=st.none() | st.lists(st.integers(-1, 13), max_size=3).map(tuple),
        segment=st.just(0),
        offset_bytes=st.integers(-2, 40),
    ),
    st.integers(1, 100),
)
def test_accepted_descriptors_touch_every_byte_once_and_inside(tensor: SourceTensor, size_bytes: int) -> None:
    """Nothing wrong passes. What is refused though it would do (strides that interleave) must be strided."""
    right = is_right(tensor, size_bytes)
    if accepted(tensor, [memfd(size_bytes)]):
        assert right
    elif right:
        assert tensor.strides is not None


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple))
def test_row_major_strides_number_the_elements(shape: tuple[int, ...]) -> None:
    strides = row_major_strides(shape)
    numbers = [sum(i * s for i, s in zip(at, strides, strict=True)) for at in product(*map(range, shape))]
    assert numbers == list(range(len(numbers)))


@given(st.integers(0, 10**6), st.integers(1, 512))
def test_aligned_is_the_next_multiple(offset: int, alignment: int) -> None:
    result = aligned(offset, alignment)
    assert result % alignment == 0
    assert offset <= result < offset + alignment


@pytest.mark.parametrize(
    "shape",
    [(-1,), (2**63 - 1,), (2**31, 2**31, 2**31), (0, 2**63 - 1, 4), (1,) * 9],
    ids=["negative", "huge", "product overflows", "zero hides a huge size", "nine dimensions"],
)
def test_impossible_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError) as refusal:
        check_shape(TensorShape(name="w", dtype=DType.BFLOAT16, shape=shape))
    assert refusal.value.code is ErrorCode.INVALID_DESCRIPTOR


@pytest.mark.parametrize(
    "segment",
    [
        MemfdSegment(pid=1, fd=3, inode=4, size_bytes=0),
        MemfdSegment(pid=1, fd=3, inode=4, size_bytes=-1),
        MemfdSegment(pid=1, fd=3, inode=4, size_bytes=2**63),
        MemfdSegment(pid=0, fd=3, inode=4, size_bytes=8),
        MemfdSegment(pid=1, fd=-1, inode=4, size_bytes=8),
        MemfdSegment(pid=1, fd=3, inode=0, size_bytes=8),
        CudaIpcSegment(pid=1, device_uuid="GPU-0", handle=b"short", size_bytes=8),
        CudaIpcSegment(pid=1, device_uuid="GPU-0", handle=bytes(64), size_bytes=8, event_handle=bytes(63)),
    ],
)
def test_impossible_segments_are_refused(segment: Segment) -> None:
    with pytest.raises(ProtocolError) as refusal:
        check_segments([segment])
    assert refusal.value.code is ErrorCode.INVALID_DESCRIPTOR


@given(
    st.lists(
        st.builds(
            BucketPiece,
            name=st.sampled_from(["a", "b", "c"]),
            first=st.integers(-1, 8),
            count=st.integers(-1, 8),
            offset_bytes=st.integers(-1, 32),
        ),
        max_size=3,
    )
)
def test_accepted_pieces_are_exactly_the_right_ones(pieces: list[BucketPiece]) -> None:
    """`a` has 6 elements of 2 bytes, `b` 3 of 4 bytes, `c` was not announced; the bucket holds 24 bytes."""
    announced = {
        "a": TensorShape(name="a", dtype=DType.BFLOAT16, shape=(2, 3)),
        "b": TensorShape(name="b", dtype=DType.FLOAT32, shape=(3,)),
    }
    try:
        check_pieces(pieces, announced, 24)
        passed = True
    except ProtocolError:
        passed = False
    assert passed == pieces_are_right(pieces, announced, 24)


def pieces_are_right(pieces: list[BucketPiece], announced: dict[str, TensorShape], bucket_bytes: int) -> bool:
    taken: set[int] = set()
    for piece in pieces:
        if piece.name not in announced or piece.first < 0 or piece.count < 0 or piece.offset_bytes < 0:
            return False
        tensor = announced[piece.name]
        item = ITEM_BYTES[tensor.dtype]
        end = piece.offset_bytes + piece.count * item
        own = set(range(piece.offset_bytes, end))
        if piece.first + piece.count > tensor.elements or end > bucket_bytes or piece.offset_bytes % item:
            return False
        if own & taken:
            return False
        taken |= own
    return True
