"""What the failure of some daemons means for all."""

from __future__ import annotations

import pytest

from refit_protocol.errors import Fault
from refit_trainer import DaemonUnreachable, OtherModel, RefitdError, SessionLost
from refit_trainer.fleet.policy import VERDICTS, Blame, OnFailure, Phase, Verdict, verdict

CLIENT = RefitdError("bad weights", fault=Fault.CLIENT)
ENGINE = RefitdError("bad engine", fault=Fault.ENGINE)
GONE = DaemonUnreachable("gone")
LOST = SessionLost("just ending")
STRANGER = OtherModel("another model")


@pytest.mark.parametrize(
    ("phase", "failures", "on_failure", "expected"),
    [
        (Phase.VALIDATION, [CLIENT], "leave_out", Verdict.REFUSE),
        (Phase.VALIDATION, [GONE, CLIENT], "leave_out", Verdict.REFUSE),
        (Phase.VALIDATION, [GONE], "leave_out", Verdict.LEAVE_OUT),
        (Phase.VALIDATION, [GONE], "restore", Verdict.REFUSE),
        (Phase.VALIDATION, [LOST, STRANGER], "leave_out", Verdict.LEAVE_OUT),
        (Phase.VALIDATION, [GONE, GONE, ENGINE], "leave_out", Verdict.REFUSE),
        (Phase.WRITING, [ENGINE], "leave_out", Verdict.LEAVE_OUT),
        (Phase.WRITING, [CLIENT], "leave_out", Verdict.LEAVE_OUT),
        (Phase.WRITING, [GONE, GONE, GONE], "leave_out", Verdict.FAIL),
        (Phase.WRITING, [GONE], "restore", Verdict.ABORT),
        (Phase.WRITING, [GONE, GONE, GONE], "restore", Verdict.ABORT),
        (Phase.PUBLISHING, [GONE, GONE], "restore", Verdict.LEAVE_OUT),
        (Phase.PUBLISHING, [GONE, GONE, GONE], "restore", Verdict.FAIL),
    ],
)
def test_verdicts(phase: Phase, failures: list[RefitdError], on_failure: OnFailure, expected: Verdict) -> None:
    """Of three daemons."""
    by_name = {str(number): error for number, error in enumerate(failures)}
    assert verdict(phase, by_name, 3, on_failure) is expected


def test_nothing_is_written_anywhere_unless_all_are_asked_first() -> None:
    """No failure in validation leads to an abort, and none after the decision undoes it."""
    for (phase, _, _), outcome in VERDICTS.items():
        if phase is Phase.VALIDATION:
            assert outcome in (Verdict.REFUSE, Verdict.LEAVE_OUT)
        if phase is Phase.PUBLISHING:
            assert outcome in (Verdict.LEAVE_OUT, Verdict.FAIL)


def test_every_case_is_in_the_table() -> None:
    """Without hold nothing is published by a second word, so that phase knows one policy only."""
    for phase in Phase:
        for blame in Blame:
            for policy in ("leave_out", "restore"):
                assert ((phase, blame, policy) in VERDICTS) == (phase is not Phase.PUBLISHING or policy == "restore")
