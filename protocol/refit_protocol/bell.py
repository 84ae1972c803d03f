"""The bell: shared memory in which a trainer starts copies that a prepared refit has waiting on the device, and lets a
commit go on that was sent before its memory was looked at.

Some 32-bit little-endian words for each worker, in a cache line of its own. A worker's copy waits until the first one,
compared as a number on a circle, has reached the number of the refit, and so begins without a process being woken. When
it has arrived and was found right, the worker writes the number into the second one. A third word of its line is not 0
as long as a refit stands by: the number that its copy waits for. One word more, for all workers, is that of the
releases: an even number lets the commit go on that waits for it, the odd one above it withdraws that. A worker that has
done what it was released for writes the number into its fourth word.
"""

from __future__ import annotations

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import MemfdSegment, check_segments

BELL_BYTES = 4096
WORD_STRIDE_BYTES = 64
ARRIVED_OFFSET_BYTES = 32
AWAITED_OFFSET_BYTES = 36
DONE_OFFSET_BYTES = 40
RELEASE_OFFSET_BYTES = 48
# For as long a commit waits for its release. It takes a trainer about a millisecond to look at its memory.
RELEASE_SECONDS = 10.0
MAX_BELL_WORKERS = BELL_BYTES // WORD_STRIDE_BYTES
_RING_VALUES = 1 << 32


def ring_number(refit: int) -> int:
    """What a word has to reach for this refit's copy to begin."""
    return refit % _RING_VALUES


def unrung_number(ring: int) -> int:
    """What both words hold before they are rung for `ring`."""
    return (ring - 1) % _RING_VALUES


def following_release(release: int) -> int:
    """The number of the commit behind the one that had this."""
    return (release + 2) % _RING_VALUES


def withdrawal(release: int) -> int:
    return release + 1


def check_release(release: int) -> None:
    """Raises `invalid_descriptor`."""
    if not 0 <= release < _RING_VALUES or release % 2:
        message = f"release {release} is no even number below {_RING_VALUES}"
        raise ProtocolError(ErrorCode.INVALID_DESCRIPTOR, message)


def check_bell(bell: MemfdSegment) -> None:
    """Raises `invalid_descriptor`."""
    check_segments([bell])
    if bell.size_bytes != BELL_BYTES:
        raise ProtocolError(ErrorCode.INVALID_DESCRIPTOR, f"a bell has {BELL_BYTES} bytes, not {bell.size_bytes}")
