"""What is said of a refit whose answer is still on its way."""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import Future

import pytest

from refit_protocol.messages import RefitReport
from refit_trainer import UsedAfterFork
from refit_trainer.report import ComingReport
from tests.trainer.background import in_background
from tests.trainer.granted import REPORT

REFUSED = 99


def exit_code_of_a_child(report: ComingReport) -> int:
    """The version that a forked child is told, or `REFUSED`."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(report.version)
        except UsedAfterFork:
            os._exit(REFUSED)
        finally:
            os._exit(98)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def coming() -> Future[RefitReport]:
    return Future()


@pytest.mark.parametrize("name", REPORT.__struct_fields__)
def test_it_has_all_that_the_daemon_says(coming: Future[RefitReport], name: str) -> None:
    """Waited for by whoever asks."""
    thread, outcome = in_background(getattr, ComingReport(coming), name)
    thread.join(0.01)
    assert thread.is_alive()
    coming.set_result(REPORT)
    thread.join()
    assert outcome == [getattr(REPORT, name)]


def test_it_is_what_it_tells(coming: Future[RefitReport]) -> None:
    report = ComingReport(coming)
    coming.set_result(REPORT)
    assert report == REPORT == report
    assert report == ComingReport(coming)
    assert repr(report) == repr(REPORT)


def test_it_may_be_sent_to_another_process(coming: Future[RefitReport]) -> None:
    """A trainer that runs in an actor returns what its refit has returned."""
    report = ComingReport(coming)
    coming.set_result(REPORT)
    assert pickle.loads(pickle.dumps(report)) == REPORT  # noqa: S301 - our own
    assert copy.deepcopy(report) == REPORT


def test_what_became_of_the_refit_is_raised(coming: Future[RefitReport], caplog: pytest.LogCaptureFixture) -> None:
    """And logged, for those who never ask."""
    report = ComingReport(coming)
    coming.set_exception(ValueError("the engine has died"))
    assert "the engine has died" in caplog.text
    with pytest.raises(ValueError, match="the engine has died"):
        assert report.version


def test_a_forked_child_does_not_wait_for_what_never_comes_there(coming: Future[RefitReport]) -> None:
    """What is known at the fork the child knows, too."""
    report = ComingReport(coming)
    assert exit_code_of_a_child(report) == REFUSED
    coming.set_result(REPORT)
    assert exit_code_of_a_child(report) == REPORT.version


def test_a_client_that_was_closed_complains_of_nothing(
    coming: Future[RefitReport], caplog: pytest.LogCaptureFixture
) -> None:
    ComingReport(coming)
    coming.cancel()
    assert not caplog.records
