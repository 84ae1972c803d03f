"""The digest is the same however the tensor is cut, and differs when anything in it does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_protocol.digest import (
    LANES,
    MASK,
    SAMPLES_PER_TENSOR,
    combine_parts,
    element_weights,
    lane_weights,
    run_sum,
    sampled_positions,
    to_hex,
)
from refit_protocol.errors import ErrorCode, ProtocolError


def whole(name: str, bits: np.ndarray) -> int:
    return run_sum(name, 0, bits, lane_weights(), lambda array: array)


def by_definition(name: str, bits: np.ndarray) -> int:
    weights = element_weights(name, np.arange(len(bits), dtype=np.int64))
    return sum(int(bit) * int(weight) for bit, weight in zip(bits, weights, strict=True)) & MASK


@given(st.integers(0, 3 * LANES), st.lists(st.integers(0, 3 * LANES), max_size=3), st.integers(0, 2**32 - 1))
def test_cutting_a_tensor_changes_nothing(elements: int, cuts: list[int], seed: int) -> None:
    """Any runs, on any ranks, add up to the digest of the whole."""
    bits = np.random.default_rng(seed).integers(-(2**15), 2**15, elements)
    borders = [0, *sorted(min(cut, elements) for cut in cuts), elements]
    total = sum(
        run_sum("w", begin, bits[begin:end], lane_weights(), lambda array: array) for begin, end in pairwise(borders)
    )
    assert total & MASK == whole("w", bits)


@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=50))
def test_the_sum_is_the_definition(bits: list[int]) -> None:
    array = np.array(bits, np.int64)
    assert whole("w", array) == by_definition("w", array)


def test_one_bit_a_swap_and_a_name_show() -> None:
    bits = np.arange(1, 10_000, dtype=np.int64)
    changed, swapped = bits.copy(), bits.copy()
    changed[5000] ^= 1
    swapped[[10, 9000]] = swapped[[9000, 10]]
    assert len({whole("w", bits), whole("w", changed), whole("w", swapped), whole("v", bits)}) == 4


@given(st.text(min_size=1), st.integers(0, 10**9))
def test_sampled_positions_lie_inside_and_repeat(name: str, elements: int) -> None:
    positions = sampled_positions(name, elements)
    assert np.array_equal(positions, sampled_positions(name, elements))
    assert np.array_equal(positions, np.unique(positions))
    assert len(positions) == 0 or (positions[0] >= 0 and positions[-1] < elements)
    assert len(positions) >= min(elements, SAMPLES_PER_TENSOR) * 0.4


def test_replicas_count_once_and_must_agree() -> None:
    assert combine_parts([{"a": "1", "b": "2"}, {"b": "2", "c": "4"}]) == to_hex(7)
    with pytest.raises(ProtocolError) as refusal:
        combine_parts([{"a": "1"}, {"a": "2"}])
    assert refusal.value.code is ErrorCode.ATTEST_FAILED
