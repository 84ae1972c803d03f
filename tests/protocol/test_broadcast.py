"""The layout of broadcasts against a model that lists the bytes of every element."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_protocol.broadcast import ALIGNMENT_BYTES, ALONE_PARTS, BroadcastLayout
from refit_protocol.tensors import DType, TensorShape, aligned, check_pieces

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPES = st.sampled_from([DType.INT8, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64])
TENSORS = st.lists(st.tuples(DTYPES, SHAPES), max_size=6).map(
    lambda drawn: tuple(
        TensorShape(name=f"t{index}", dtype=dtype, shape=shape) for index, (dtype, shape) in enumerate(drawn)
    )
)
SIZES = st.integers(1, 20).map(lambda count: count * ALIGNMENT_BYTES)


@given(TENSORS, SIZES)
def test_every_element_comes_once_in_order_and_inside_its_broadcast(
    tensors: tuple[TensorShape, ...], bucket_bytes: int
) -> None:
    layout = BroadcastLayout(tensors, bucket_bytes)
    announced = {tensor.name: tensor for tensor in tensors}
    came: dict[str, list[int]] = {name: [] for name in announced}
    order = []
    for broadcast in layout.broadcasts:
        assert 0 < broadcast.size_bytes <= bucket_bytes
        check_pieces(list(broadcast.pieces), announced, broadcast.size_bytes)
        for piece in broadcast.pieces:
            came[piece.name] += range(piece.first, piece.first + piece.count)
            order.append(piece.name)
    assert came == {tensor.name: list(range(tensor.elements)) for tensor in tensors}
    assert order == sorted(order)
    assert layout.size_bytes == sum(broadcast.size_bytes for broadcast in layout.broadcasts)


@given(TENSORS, SIZES)
def test_large_tensors_stand_alone_in_full_broadcasts_and_small_ones_whole_and_aligned(
    tensors: tuple[TensorShape, ...], bucket_bytes: int
) -> None:
    layout = BroadcastLayout(tensors, bucket_bytes)
    announced = {tensor.name: tensor for tensor in tensors}
    for broadcast in layout.broadcasts:
        for piece in broadcast.pieces:
            tensor = announced[piece.name]
            if ALONE_PARTS * tensor.size_bytes >= bucket_bytes:
                assert len(broadcast.pieces) == 1
                is_last = piece.first + piece.count == tensor.elements
                assert is_last or broadcast.size_bytes == bucket_bytes
            else:
                assert piece.count == tensor.elements
            assert piece.offset_bytes % ALIGNMENT_BYTES == 0


@given(TENSORS, SIZES)
def test_no_room_is_left_where_a_small_tensor_would_fit(tensors: tuple[TensorShape, ...], bucket_bytes: int) -> None:
    """Gaps between tensors are shorter than the alignment, and a new broadcast begins only where it must."""
    layout = BroadcastLayout(tensors, bucket_bytes)
    announced = {tensor.name: tensor for tensor in tensors}
    small = [b for b in layout.broadcasts if ALONE_PARTS * announced[b.pieces[0].name].size_bytes < bucket_bytes]
    for broadcast in small:
        for piece, following in pairwise(broadcast.pieces):
            gap = following.offset_bytes - piece.offset_bytes - announced[piece.name].size_bytes
            assert 0 <= gap < ALIGNMENT_BYTES
    for broadcast, following in pairwise(layout.broadcasts):
        if broadcast in small and following in small:
            begin = aligned(broadcast.size_bytes, ALIGNMENT_BYTES)
            assert begin + announced[following.pieces[0].name].size_bytes > bucket_bytes


@given(TENSORS, TENSORS, SIZES)
def test_a_layout_is_kept_for_the_same_tensors_and_made_for_others(
    tensors: tuple[TensorShape, ...], others: tuple[TensorShape, ...], bucket_bytes: int
) -> None:
    layout = BroadcastLayout(tensors, bucket_bytes)
    assert layout.of(tuple(tensors)) is layout
    assert layout.of(others) == BroadcastLayout(others, bucket_bytes)


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
