"""What a worker waits for before it reads memory that its trainer still looks at."""

from __future__ import annotations

import os
import signal

import msgspec
import pytest

from refit_protocol.bell import MAX_BELL_WORKERS, withdrawal
from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.worker.release import Release, open_release
from tests.lending import HostBell
from tests.trainer.background import in_background

NUMBER = 6


@pytest.fixture
def bell() -> HostBell:
    return HostBell()


def refused(release: Release, seconds: float = 30.0) -> ErrorCode:
    with pytest.raises(ProtocolError) as error:
        release.wait(NUMBER, seconds)
    return error.value.code


def test_it_waits_for_its_own_number(bell: HostBell) -> None:
    """Neither the commit before, released or withdrawn, nor the one behind is meant."""
    waiting, outcome = in_background(Release(bell.segment, 0).wait, NUMBER)
    for other in (NUMBER - 2, withdrawal(NUMBER - 2), NUMBER + 2):
        bell.release.write(other)
        waiting.join(0.02)
        assert waiting.is_alive()
    bell.release.write(NUMBER)
    waiting.join(30)
    assert outcome == [None]


def test_a_withdrawn_commit_is_refused(bell: HostBell) -> None:
    bell.release.write(withdrawal(NUMBER))
    assert refused(Release(bell.segment, 0)) is ErrorCode.REFIT_FAILED


def test_a_trainer_that_says_nothing_is_not_waited_for_for_ever(bell: HostBell) -> None:
    assert refused(Release(bell.segment, 0), seconds=0.01) is ErrorCode.DEADLINE_EXCEEDED


def test_a_trainer_that_is_gone_is_not_waited_for(bell: HostBell) -> None:
    """Long before the time is over."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        release = Release(msgspec.structs.replace(bell.segment, pid=child), 0)
        waiting, outcome = in_background(refused, release)
        waiting.join(0.02)
        assert waiting.is_alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    waiting.join(30)
    assert outcome == [ErrorCode.MEMORY_UNAVAILABLE]


def test_a_bell_that_cannot_be_opened_releases_nothing(bell: HostBell) -> None:
    """The source can be used all the same."""
    assert open_release(None, 0) is None
    assert open_release(msgspec.structs.replace(bell.segment, fd=1 << 20), 0) is None
    assert open_release(bell.segment, 0) is not None


def test_what_is_done_is_told_in_the_workers_own_line(bell: HostBell) -> None:
    """Beside the word that every worker looks at."""
    bell.release.write(NUMBER)
    Release(bell.segment, 1).tell_done(NUMBER)
    assert [bell.done(worker) for worker in range(3)] == [0, NUMBER, 0]
    assert bell.release.holds(NUMBER)


def test_a_worker_without_a_line_releases_nothing(bell: HostBell) -> None:
    """It could not tell when it is done."""
    assert open_release(bell.segment, MAX_BELL_WORKERS - 1) is not None
    assert open_release(bell.segment, MAX_BELL_WORKERS) is None
