"""The digest of a set of weights: one 64-bit number that trainer and engine compute alike, each from its own layout.

It is the sum, modulo 2^64, over all elements of all checkpoint tensors of `bits * weight`. `bits` is the element in the
engine's dtype, read as a signed integer of the same width. `weight` is odd and depends on the tensor's name and the
element's row-major index: so it does not matter in which order, on which rank or in which fused parameter an element is
found, but moving, dropping or changing one shows. A sampled digest sums over `sampled_positions` of each tensor only.

The arithmetic is the same for NumPy arrays and torch tensors; this module itself imports only NumPy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refit_protocol.errors import ErrorCode, ProtocolError

LANES = 4096
SAMPLES_PER_TENSOR = 64
MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class DigestMode(StrEnum):
    SAMPLED = "sampled"
    FULL = "full"


def to_hex(digest: int) -> str:
    return f"{digest & MASK:016x}"


def combine_parts(ranks: Iterable[Mapping[str, str]]) -> str:
    """The digest of all ranks together, from the parts each reports.

    Ranks that hold the same elements report them under the same key and are counted once; if such replicas differ, the
    served weights are not one model: raises `attest_failed`.
    """
    parts: dict[str, str] = {}
    for rank in ranks:
        for key, value in rank.items():
            if parts.setdefault(key, value) != value:
                raise ProtocolError(ErrorCode.ATTEST_FAILED, "ranks that hold the same weights disagree about them")
    return to_hex(sum(int(value, 16) for value in parts.values()))


def sampled_positions(name: str, elements: int) -> NDArray[np.int64]:
    """Sorted row-major indices: all of a small tensor, up to `SAMPLES_PER_TENSOR` of a large one."""
    if elements <= SAMPLES_PER_TENSOR:
        return np.arange(elements, dtype=np.int64)
    draws = _mix(np.arange(SAMPLES_PER_TENSOR, dtype=np.uint64) * np.uint64(_GOLDEN) + name_salt(name))
    return np.unique(draws % np.uint64(elements)).astype(np.int64)


def element_weights(name: str, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The weight of each row-major index of the tensor `name`."""
    return lane_weights()[indices % LANES] * block_weights(name, indices // LANES)


@lru_cache(maxsize=1)
def lane_weights() -> NDArray[np.int64]:
    """The factor of the weight that depends on `index % LANES`."""
    return _odd(_mix(np.arange(LANES, dtype=np.uint64)))


def block_weights(name: str, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The factor of the weight that depends on the name and on `index // LANES`."""
    return _odd(_mix(blocks.astype(np.uint64) + name_salt(name)))


def run_sum(name: str, first: int, bits: Any, lanes: Any, as_array: Callable[[NDArray[np.int64]], Any]) -> int:
    """The digest of a run of consecutive elements that starts at row-major index `first`.

    `bits` holds the elements as one-dimensional int64; `lanes` is `lane_weights()` and `as_array` turns a NumPy array
    into one, both of the kind and on the device of `bits`.
    """
    count = bits.shape[0]
    head = min(-first % LANES, count)
    body = (count - head) // LANES * LANES
    total = _partial_sum(name, first, bits[:head], lanes)
    if body:
        blocks = np.arange((first + head) // LANES, (first + head + body) // LANES, dtype=np.int64)
        rows = (bits[head : head + body].reshape(-1, LANES) * lanes).sum(1)
        total += int((rows * as_array(block_weights(name, blocks))).sum())
    return (total + _partial_sum(name, first + head + body, bits[head + body :], lanes)) & MASK


def _partial_sum(name: str, first: int, bits: Any, lanes: Any) -> int:
    """Of a run that lies inside one block."""
    if not bits.shape[0]:
        return 0
    lane = first % LANES
    block = int(block_weights(name, np.array([first // LANES], dtype=np.int64))[0])
    return int((bits * lanes[lane : lane + bits.shape[0]]).sum()) * block


@lru_cache(maxsize=1 << 16)
def name_salt(name: str) -> np.uint64:
    """What makes the weights of one tensor differ from another's: `block_weights` are `mix(block + salt) | 1`."""
    return np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _odd(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (values | np.uint64(1)).view(np.int64)
