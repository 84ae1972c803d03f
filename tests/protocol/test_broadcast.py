"""The layout of broadcasts against a model that lists the bytes of every element."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_protocol.broadcast import ALIGNMENT_BYTES, BroadcastLayout
from refit_protocol.tensors import ITEM_BYTES, DType, TensorShape, check_pieces

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPES = st.sampled_from([DType.INT8, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64])
TENSORS = st.lists(st.tuples(DTYPES, SHAPES), max_size=6).map(
    lambda drawn: tuple(
        TensorShape(name=f"t{index}", dtype=dtype, shape=shape) for index, (dtype, shape) in enumerate(drawn)
    )
)
SIZES = st.integers(1, 20).map(lambda count: count * ALIGNMENT_BYTES)


@given(TENSORS, SIZES)
def test_every_element_comes_once_in_order_and_inside_its_piece(
    tensors: tuple[TensorShape, ...], bucket_bytes: int
) -> None:
    layout = BroadcastLayout(tensors, bucket_bytes)
    announced = {tensor.name: tensor for tensor in tensors}
    came: dict[str, list[int]] = {name: [] for name in announced}
    for number, pieces in enumerate(layout.buckets):
        check_pieces(list(pieces), announced, layout.broadcast_bytes(number))
        for piece in pieces:
            came[piece.name] += range(piece.first, piece.first + piece.count)
    assert came == {tensor.name: list(range(tensor.elements)) for tensor in tensors}


@given(TENSORS, SIZES)
def test_all_pieces_but_the_last_are_full_and_tensors_start_aligned(
    tensors: tuple[TensorShape, ...], bucket_bytes: int
) -> None:
    layout = BroadcastLayout(tensors, bucket_bytes)
    sizes = [layout.broadcast_bytes(number) for number in range(len(layout))]
    assert sum(sizes) == layout.size_bytes
    assert all(size == bucket_bytes for size in sizes[:-1])
    assert all(size > 0 for size in sizes)
    for number, pieces in enumerate(layout.buckets):
        for piece in pieces:
            if piece.first == 0:
                assert (number * bucket_bytes + piece.offset_bytes) % ALIGNMENT_BYTES == 0


@given(TENSORS, SIZES)
def test_no_byte_lies_between_tensors_but_padding(tensors: tuple[TensorShape, ...], bucket_bytes: int) -> None:
    """The gaps of the stream are shorter than the alignment."""
    layout = BroadcastLayout(tensors, bucket_bytes)
    spans = [
        (start := number * bucket_bytes + piece.offset_bytes, start + piece.count * ITEM_BYTES[by_name.dtype])
        for number, pieces in enumerate(layout.buckets)
        for piece in pieces
        for by_name in tensors
        if by_name.name == piece.name
    ]
    assert all(0 <= begin - end < ALIGNMENT_BYTES for (_, end), (begin, _) in pairwise(spans))


@pytest.mark.parametrize(
    "other",
    [
        (TensorShape(name="a", dtype=DType.FLOAT32, shape=(2, 3)), TensorShape(name="b", dtype=DType.INT8, shape=())),
        (TensorShape(name="b", dtype=DType.INT8, shape=()), TensorShape(name="a", dtype=DType.FLOAT16, shape=(2, 3))),
        (TensorShape(name="b", dtype=DType.INT8, shape=()), TensorShape(name="a", dtype=DType.FLOAT32, shape=(6,))),
        (TensorShape(name="b", dtype=DType.INT8, shape=()),),
    ],
)
def test_other_order_dtype_shape_or_names_have_another_fingerprint(other: tuple[TensorShape, ...]) -> None:
    tensors = (
        TensorShape(name="b", dtype=DType.INT8, shape=()),
        TensorShape(name="a", dtype=DType.FLOAT32, shape=(2, 3)),
    )
    layout = BroadcastLayout(tensors, 64)
    assert layout.fingerprint == BroadcastLayout(tensors, 128).fingerprint
    assert layout.fingerprint != BroadcastLayout(other, 64).fingerprint
