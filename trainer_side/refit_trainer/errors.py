"""What a call to a daemon can raise: one base class, whose attributes say what happened, whose fault, what may help."""
# Facts, not "errors": the names read as what happened.
# ruff: noqa: N818

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from refit_protocol.errors import ERROR_RULES, ErrorCode, Fault
from refit_protocol.messages import Failed
from refit_trainer.stream import Delta, Sample


class RefitdError(Exception):
    """A request that was not served.

    `code` is the daemon's `ErrorCode`, or None where the daemon never answered. `fault` says who has to change
    something, `retryable` that the same call may work later; `details` holds the names, limits and shapes in question.
    """

    default_fault: ClassVar[Fault] = Fault.CLIENT
    default_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode | None = None,
        fault: Fault | None = None,
        retryable: bool | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.fault = self.default_fault if fault is None else fault
        self.retryable = self.default_retryable if retryable is None else retryable
        self.details: dict[str, Any] = dict(details or {})

    def __str__(self) -> str:
        return self.message if self.code is None else f"{self.code.value}: {self.message}"


class DaemonUnreachable(RefitdError):
    """Nobody answers at the endpoint, or the connection broke, or the daemon fell silent for a minute, while an answer
    was awaited: its outcome is unknown.
    """

    default_fault = Fault.DAEMON
    default_retryable = True


class DaemonRestarted(RefitdError):
    """Another daemon process answers than before: it serves the weights it was started with, so refit first.

    Raised once, by what was under way or else by the next call; calls after that go to the new process.
    """

    default_fault = Fault.DAEMON
    default_retryable = True


class SessionLost(RefitdError):
    """The lease ran out: streams and sources of the session are gone. The next call opens a new session by itself."""

    default_retryable = True


class RequestTimedOut(RefitdError, TimeoutError):
    """No answer came within `timeout_seconds`; whether the daemon has done the work is unknown."""

    default_fault = Fault.DAEMON
    default_retryable = True


class OutputIncomplete(RefitdError):
    """Outputs were cut off before their end: by a deadline, by a refit or sleep with policy `abort`, by NaN, or because
    the engine ended. The generation was given up with it; `code` says why, of the first one.

    `samples` holds what there is of them, where whole samples were asked for; a stream has yielded their tokens. With
    `incomplete="yield"` they come like others, and this is not raised.
    """

    def __init__(self, cut_off: Sequence[Delta | Sample]) -> None:
        first = cut_off[0]
        code = first.error or ErrorCode.ENGINE_ERROR
        others = f" and {len(cut_off) - 1} more" if len(cut_off) > 1 else ""
        super().__init__(
            f"output {first.output} of prompt {first.prompt}{others} ended before being complete; "
            'with incomplete="yield" such outputs come like others',
            code=code,
            fault=ERROR_RULES[code].fault,
            retryable=ERROR_RULES[code].retryable,
            details={"prompt": first.prompt, "output": first.output, "finish_reason": first.finish_reason},
        )
        self.samples = tuple(output for output in cut_off if isinstance(output, Sample))


class ClientClosed(RefitdError):
    """The client was used after `close()`."""


class UsedAfterFork(RefitdError):
    """The client was used in a forked child: sockets and threads belong to the process that made them."""


class NotShareable(RefitdError):
    """A module's parameters cannot be exported from where they lie."""


class LayoutMismatch(RefitdError):
    """The tensors that come are not those that were expected: by `specs`, else of the last refit or of the engine."""


class SettingsMismatch(RefitdError):
    """The daemon that was named was started with other settings than the configuration at hand asks for."""


class OfMembers(RefitdError):
    """Several daemons of a fleet: `errors` says by endpoint what each one failed with."""

    def __init__(self, message: str, errors: Mapping[str, RefitdError], *, retryable: bool | None = None) -> None:
        first = next(iter(errors.values()), None)
        listed = "; ".join(f"{endpoint}: {error}" for endpoint, error in errors.items())
        super().__init__(
            f"{message}: {listed}" if listed else message,
            code=None if first is None else first.code,
            fault=None if first is None else first.fault,
            retryable=all(error.retryable for error in errors.values()) if retryable is None else retryable,
            details={"members": [*errors]},
        )
        self.errors = dict(errors)

    def __str__(self) -> str:
        return self.message


class FleetMismatch(OfMembers):
    """The daemons of a fleet do not serve one model, or not the same weights under one version."""


class OtherModel(RefitdError):
    """A daemon serves another model than the others of its fleet, and takes no part in it."""

    default_fault = Fault.DAEMON


class FleetRefitRefused(OfMembers):
    """Nothing was written at any daemon: all of them serve what they served before."""


class FleetRefitFailed(OfMembers):
    """A daemon failed after its first write. By the fleet's `on_failure` the others serve the old version again
    ("restore"), or there was no other ("leave_out"); `Fleet.status()` says what each of them serves.
    """


class NoMember(RefitdError):
    """No daemon of the fleet can serve what is asked for now."""

    default_fault = Fault.DAEMON
    default_retryable = True


class MemberLost(RefitdError):
    """A daemon ended in the middle of outputs: what came of them is a part. Ask for these prompts again.

    Raised when everything else has come. `details` holds the numbers of the `prompts`, and the `endpoint` of the first
    daemon that ended; `code` is its reason, None where it gave none.
    """

    default_fault = Fault.DAEMON
    default_retryable = True


class VersionsMixed(RefitdError):
    """A daemon changed its weights under a batch that was to be of one version, by another trainer's doing."""

    default_retryable = True


def error_from(failed: Failed) -> RefitdError:
    """The exception for a `Failed` reply."""
    if failed.code is ErrorCode.NO_SESSION:
        # Final for the session, not for the caller.
        message = "the daemon has ended this session, whose lease ran out, or ends itself: the next call opens another"
        return SessionLost(message, code=failed.code, details=failed.details)
    return RefitdError(
        failed.message, code=failed.code, fault=failed.fault, retryable=failed.retryable, details=failed.details
    )
