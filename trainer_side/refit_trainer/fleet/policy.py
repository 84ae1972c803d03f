"""What becomes of a refit of several daemons when some of them fail. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from refit_protocol.errors import Fault
from refit_trainer.errors import RefitdError, SessionLost

OnFailure = Literal["leave_out", "restore"]


class Phase(StrEnum):
    VALIDATION = "before the first write"
    WRITING = "after the first write"
    PUBLISHING = "after the decision"


class Blame(StrEnum):
    """Whose failure it is: that of the request, which no daemon would take, or that of single daemons."""

    REQUEST = "the request"
    SOME = "some daemons"
    ALL = "all daemons"


class Verdict(StrEnum):
    REFUSE = "nothing was written anywhere: say why"
    LEAVE_OUT = "go on without those that failed"
    ABORT = "every daemon that has written puts its weights back"
    FAIL = "nobody is left: say why"


VERDICTS: Mapping[tuple[Phase, Blame, OnFailure], Verdict] = {
    (Phase.VALIDATION, Blame.REQUEST, "leave_out"): Verdict.REFUSE,
    (Phase.VALIDATION, Blame.REQUEST, "restore"): Verdict.REFUSE,
    (Phase.VALIDATION, Blame.SOME, "leave_out"): Verdict.LEAVE_OUT,
    (Phase.VALIDATION, Blame.SOME, "restore"): Verdict.REFUSE,
    (Phase.VALIDATION, Blame.ALL, "leave_out"): Verdict.REFUSE,
    (Phase.VALIDATION, Blame.ALL, "restore"): Verdict.REFUSE,
    (Phase.WRITING, Blame.REQUEST, "leave_out"): Verdict.LEAVE_OUT,
    (Phase.WRITING, Blame.REQUEST, "restore"): Verdict.ABORT,
    (Phase.WRITING, Blame.SOME, "leave_out"): Verdict.LEAVE_OUT,
    (Phase.WRITING, Blame.SOME, "restore"): Verdict.ABORT,
    (Phase.WRITING, Blame.ALL, "leave_out"): Verdict.FAIL,
    (Phase.WRITING, Blame.ALL, "restore"): Verdict.ABORT,
    (Phase.PUBLISHING, Blame.REQUEST, "restore"): Verdict.LEAVE_OUT,
    (Phase.PUBLISHING, Blame.SOME, "restore"): Verdict.LEAVE_OUT,
    (Phase.PUBLISHING, Blame.ALL, "restore"): Verdict.FAIL,
}


def verdict(phase: Phase, failures: Mapping[str, RefitdError], members: int, on_failure: OnFailure) -> Verdict:
    """`members` took part in the phase, those of `failures` failed, at least one."""
    return VERDICTS[phase, _blame(failures, members), on_failure]


def _blame(failures: Mapping[str, RefitdError], members: int) -> Blame:
    if len(failures) == members:
        return Blame.ALL
    if any(_is_of_the_request(error) for error in failures.values()):
        return Blame.REQUEST
    return Blame.SOME


def _is_of_the_request(error: RefitdError) -> bool:
    """A lost session is the client's fault, or that of a daemon which just ends; other daemons have theirs."""
    return error.fault is Fault.CLIENT and not isinstance(error, SessionLost)
