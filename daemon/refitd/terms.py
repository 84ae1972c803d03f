"""What a refit's trainer asks for, with the configuration's word wherever it says nothing."""

from __future__ import annotations

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import AttestMode, BeginRefit, CommitRefit, PrepareRefit, ReloadWeights, ValidateRefit
from refitd.commit import Commit, Ticket
from refitd.config import RefitConfig

Asked = CommitRefit | PrepareRefit | BeginRefit | ReloadWeights | ValidateRefit


def ticket_for(body: Asked, commit: Commit, defaults: RefitConfig, *, partial: bool) -> Ticket:
    """Raises what makes such a refit impossible from the start; see `Commit.ticket`."""
    commit.refuse_while_busy()
    deadline_seconds = wait_seconds(body.deadline_seconds, defaults)
    attest: AttestMode = body.attest or defaults.attest
    return commit.ticket(
        version=body.version,
        policy=body.policy or defaults.policy,
        attest=attest,
        check_finite=defaults.check_finite if body.check_finite is None else body.check_finite,
        deadline_seconds=deadline_seconds,
        partial=partial,
    )


def wait_seconds(asked: float | None, defaults: RefitConfig) -> float:
    """Raises `deadline_exceeded` where none is left."""
    return _left("deadline_seconds", asked, defaults.deadline_seconds)


def hold_seconds(asked: float | None, defaults: RefitConfig) -> float:
    """Raises `deadline_exceeded` where none is left."""
    return _left("hold_seconds", asked, defaults.hold_seconds)


def _left(name: str, asked: float | None, default: float) -> float:
    if asked is not None and asked <= 0:
        raise ProtocolError(ErrorCode.DEADLINE_EXCEEDED, f"{name} is {asked:g}: none is left")
    return asked or default
