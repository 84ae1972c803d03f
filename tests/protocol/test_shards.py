"""Whether the parts that ranks hold make a whole, against a model that counts every element."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.shards import check_parts
from refit_protocol.tensors import DType, MemfdSegment, Shard, SourceTensor, check_source_tensors

MEMORY = [MemfdSegment(pid=1, fd=3, inode=4, size_bytes=4096)]


def part(
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    whole: tuple[int, ...],
    dtype: DType = DType.FLOAT32,
    name: str = "w",
) -> SourceTensor:
    shard = Shard(whole=whole, offsets=offsets)
    return SourceTensor(name=name, dtype=dtype, shape=shape, segment=0, offset_bytes=0, shard=shard)


def refusal(*parts: SourceTensor) -> str:
    with pytest.raises(ProtocolError) as refused:
        check_parts({rank: [each] for rank, each in enumerate(parts)})
    assert refused.value.code is ErrorCode.GROUP_MISMATCH
    return refused.value.message


@st.composite
def boxes(draw: st.DrawFn) -> list[SourceTensor]:
    """Up to four regions of a small matrix, some of them empty."""
    whole = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        offsets = tuple(draw(st.integers(0, size - 1)) for size in whole)
        sizes = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(whole, offsets, strict=True))
        parts.append(part(sizes, offsets, whole))
    return parts


@given(boxes())
def test_the_parts_are_a_whole_exactly_if_every_element_is_there_once(parts: list[SourceTensor]) -> None:
    """Regions that are equal count once."""
    regions = {(each.shard.offsets, each.shape) for each in parts if each.shard}
    counts = Counter(
        index
        for offsets, sizes in regions
        for index in product(*(range(first, first + size) for first, size in zip(offsets, sizes, strict=True)))
    )
    whole = parts[0].whole_shape
    if set(counts.values()) == {1} and len(counts) == whole[0] * whole[1]:
        check_parts(dict(enumerate([each] for each in parts)))
    else:
        assert refusal(*parts)


def test_uneven_and_empty_shards_and_replicas() -> None:
    """Three rows over two ranks; a single row, of which the second rank holds nothing; the same whole twice."""
    check_parts(
        {
            0: [part((2, 4), (0, 0), (3, 4)), part((1,), (0,), (1,), name="norm")],
            1: [part((1, 4), (2, 0), (3, 4)), part((0,), (1,), (1,), name="norm")],
        }
    )
    whole = SourceTensor(name="w", dtype=DType.FLOAT32, shape=(3, 4), segment=0, offset_bytes=0)
    check_parts({0: [whole], 1: [whole]})
    scalar = SourceTensor(name="s", dtype=DType.FLOAT32, shape=(), segment=0, offset_bytes=0)
    empty = SourceTensor(name="e", dtype=DType.FLOAT32, shape=(0, 4), segment=0, offset_bytes=0)
    check_parts({0: [scalar, empty], 1: []})


def test_what_does_not_fit_is_named_with_its_ranks() -> None:
    """Dtypes, whole shapes, an overlap, a gap."""
    top, bottom = part((2, 4), (0, 0), (4, 4)), part((2, 4), (2, 0), (4, 4))
    assert "dtype float32 on rank 0, bfloat16 on rank 1" in refusal(top, part((2, 4), (2, 0), (4, 4), DType.BFLOAT16))
    assert "shape [4, 4] on rank 0, [5, 4] on rank 1" in refusal(top, part((3, 4), (2, 0), (5, 4)))
    assert "ranks 0 and 1 overlap" in refusal(top, part((3, 4), (1, 0), (4, 4)))
    assert "8 of 16 elements" in refusal(bottom)


@pytest.mark.parametrize(
    ("shape", "offsets", "whole"),
    [
        ((2, 4), (3, 0), (4, 4)),
        ((2,), (-1,), (4,)),
        ((2,), (0, 0), (4,)),
        ((2,), (0,), (4, 4)),
        ((1,), (0,), (1 << 62,)),
    ],
)
def test_shards_that_cannot_be(shape: tuple[int, ...], offsets: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """Outside their whole, of other dimensions, or of a whole larger than any memory."""
    with pytest.raises(ProtocolError) as refused:
        check_source_tensors([part(shape, offsets, whole)], MEMORY)
    assert refused.value.code is ErrorCode.INVALID_DESCRIPTOR
