"""The numbers a bell is rung with, and what may be one."""

from __future__ import annotations

import pytest

from refit_protocol.bell import (
    BELL_BYTES,
    MAX_BELL_WORKERS,
    WORD_STRIDE_BYTES,
    check_bell,
    check_release,
    following_release,
    ring_number,
    unrung_number,
    withdrawal,
)
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import MemfdSegment

LAST = (1 << 32) - 1


def reached(word: int, number: int) -> bool:
    """What a device waits for: `(int32_t)(word - number) >= 0`."""
    return (word - number) % (1 << 32) < 1 << 31


@pytest.mark.parametrize("refit", [1, 2, 1 << 31, LAST, LAST + 1, LAST + 2, 1 << 40])
def test_a_word_is_rung_for_a_refit_and_not_before(refit: int) -> None:
    """Also where the numbers of refits no longer fit into a word; the next refit is not rung for by it."""
    number = ring_number(refit)
    assert 0 <= number <= LAST
    assert reached(number, number)
    assert not reached(unrung_number(number), number)
    assert not reached(number, ring_number(refit + 1))


@pytest.mark.parametrize("release", [0, 2, 1 << 31, LAST - 1])
def test_a_withdrawal_releases_nothing_else(release: int) -> None:
    """Neither the commit before nor the one behind; numbers begin anew when they no longer fit into a word."""
    following = following_release(release)
    for number in (release, following):
        check_release(number)
        assert withdrawal(number) <= LAST
    assert len({release, withdrawal(release), following, withdrawal(following)}) == 4


@pytest.mark.parametrize("release", [-2, 1, LAST, LAST + 1])
def test_what_is_no_release_is_refused(release: int) -> None:
    with pytest.raises(ProtocolError) as refused:
        check_release(release)
    assert refused.value.code is ErrorCode.INVALID_DESCRIPTOR


def test_every_worker_has_a_word_in_a_line_of_its_own() -> None:
    assert WORD_STRIDE_BYTES >= 64
    assert MAX_BELL_WORKERS * WORD_STRIDE_BYTES == BELL_BYTES


def segment(size_bytes: int = BELL_BYTES, fd: int = 3) -> MemfdSegment:
    return MemfdSegment(pid=7, fd=fd, inode=1, size_bytes=size_bytes)


def test_a_bell_is_a_page() -> None:
    """Each is mapped, and pinned, by every worker: it cannot be as large as somebody likes."""
    check_bell(segment())
    for bad in (segment(0), segment(BELL_BYTES - 1), segment(BELL_BYTES + 1), segment(1 << 40), segment(fd=-1)):
        with pytest.raises(ProtocolError) as refused:
            check_bell(bad)
        assert refused.value.code is ErrorCode.INVALID_DESCRIPTOR
