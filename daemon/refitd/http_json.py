"""What JSON is made of, before anything parses it: parsers hold the event loop, and everybody waits for it.

In arrays, since a body may hold a bracket a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refit_protocol.errors import ErrorCode, ProtocolError

# Parsers recurse.
MAX_DEPTH = 100
# vLLM makes an object of each: some 20 microseconds. A conversation of ten thousand messages has less.
MAX_CONTAINERS = 1 << 15
# As many as a message on the wire may have. A context of a million tokens, given twice, has less.
MAX_VALUES = 1 << 21

CHUNK_BYTES = 1 << 20
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'


@dataclass(frozen=True)
class Shape:
    """`values` counts what commas divide, and the objects and arrays, which are the `containers`."""

    depth: int
    containers: int
    values: int


def check_json(body: bytes) -> None:
    """Raises `malformed_message` or `message_too_large` for what would keep a parser busy for seconds, or too deep."""
    # Parsers take UTF-16, in which other characters hold the bytes that are counted here. JSON in UTF-8 has no zeros.
    if b"\0" in body:
        raise ProtocolError(ErrorCode.MALFORMED_MESSAGE, "the body is no JSON in UTF-8")
    shape = shape_of(body)
    if shape.depth > MAX_DEPTH:
        raise ProtocolError(ErrorCode.MALFORMED_MESSAGE, f"JSON nested more than {MAX_DEPTH} levels deep")
    if shape.containers > MAX_CONTAINERS:
        raise _too_many(shape.containers, "objects and arrays", MAX_CONTAINERS)
    if shape.values > MAX_VALUES:
        raise _too_many(shape.values, "values", MAX_VALUES)


def shape_of(body: bytes) -> Shape:
    """Of JSON; of anything else some numbers."""
    level, deepest, containers, commas = 0, 0, 0, 0
    in_string, escaped = False, False
    for start in range(0, len(body), CHUNK_BYTES):
        chunk = np.frombuffer(body, np.uint8, min(CHUNK_BYTES, len(body) - start), start)
        is_escaped, escaped = _escaped(chunk, escaped)
        outside = (np.cumsum((chunk == _QUOTE) & ~is_escaped) + in_string) % 2 == 0
        # Square brackets are braces but for one bit.
        opening, closing = (((chunk | 0x20) == brace) & outside for brace in b"{}")
        levels = level + np.cumsum(opening.astype(np.int8) - closing.astype(np.int8), dtype=np.int64)
        deepest = max(deepest, int(levels.max()))
        containers += int(np.count_nonzero(opening))
        commas += int(np.count_nonzero((chunk == _COMMA) & outside))
        level, in_string = int(levels[-1]), not outside[-1]
    return Shape(deepest, containers, commas + containers)


def _escaped(chunk: NDArray[np.uint8], first: bool) -> tuple[NDArray[np.bool_], bool]:
    """Which bytes follow an odd number of backslashes, `first` for the first one; and whether the next one does."""
    backslashes = chunk == _BACKSLASH
    backslashes[0] &= not first
    positions = np.arange(len(chunk))
    run_lengths = positions - np.maximum.accumulate(np.where(backslashes, -1, positions))
    escaping = backslashes & (run_lengths % 2 == 1)
    return np.concatenate([[first], escaping[:-1]]), bool(escaping[-1])


def _too_many(count: int, what: str, limit: int) -> ProtocolError:
    return ProtocolError(ErrorCode.MESSAGE_TOO_LARGE, f"JSON of {count} {what}, at most {limit}: send several requests")
