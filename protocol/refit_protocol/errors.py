"""Every way a request can fail: the code, whose fault it is, and whether sending it again can work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    CLIENT = "client"
    DAEMON = "daemon"
    ENGINE = "engine"


class ErrorCode(StrEnum):
    # the wire
    MALFORMED_MESSAGE = "malformed_message"
    MESSAGE_TOO_LARGE = "message_too_large"
    UNSUPPORTED_VERSION = "unsupported_version"
    LIMIT_EXCEEDED = "limit_exceeded"
    # sessions
    NO_SESSION = "no_session"
    SESSION_LIMIT = "session_limit"
    WRITER_BUSY = "writer_busy"
    STALE_EPOCH = "stale_epoch"
    DUPLICATE_REQUEST = "duplicate_request"
    UNKNOWN_REQUEST = "unknown_request"
    PEER_NOT_ALLOWED = "peer_not_allowed"
    # sources and refits
    INVALID_DESCRIPTOR = "invalid_descriptor"
    MEMORY_UNAVAILABLE = "memory_unavailable"
    WRONG_DEVICE = "wrong_device"
    UNKNOWN_SOURCE = "unknown_source"
    UNKNOWN_REFIT = "unknown_refit"
    MANIFEST_MISMATCH = "manifest_mismatch"
    PLAN_REQUIRED = "plan_required"
    NOT_FINITE = "not_finite"
    VERSION_NOT_INCREASING = "version_not_increasing"
    REFIT_IN_PROGRESS = "refit_in_progress"
    GROUP_INCOMPLETE = "group_incomplete"
    GROUP_MISMATCH = "group_mismatch"
    REFIT_FAILED = "refit_failed"
    ATTEST_FAILED = "attest_failed"
    INVALID_CHECKPOINT = "invalid_checkpoint"
    NOTHING_TO_RESTORE = "nothing_to_restore"
    COLLECTIVE_FAILED = "collective_failed"
    # generation
    INVALID_ADAPTER = "invalid_adapter"
    UNKNOWN_ADAPTER = "unknown_adapter"
    INVALID_PROMPT = "invalid_prompt"
    INVALID_SAMPLING = "invalid_sampling"
    VERSION_UNAVAILABLE = "version_unavailable"
    TOO_MANY_REQUESTS = "too_many_requests"
    CANCELLED = "cancelled"
    ABORTED = "aborted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NOT_A_NUMBER = "not_a_number"
    # the engine
    LOADING = "loading"
    TORN = "torn"
    ASLEEP = "asleep"
    DRAINING = "draining"
    ENGINE_DEAD = "engine_dead"
    ENGINE_ERROR = "engine_error"
    NOT_ALLOWED_NOW = "not_allowed_now"
    CACHE_NOT_RESET = "cache_not_reset"
    UNSUPPORTED = "unsupported"
    INTERNAL = "internal"


@dataclass(frozen=True)
class ErrorRule:
    """`retryable` says that the same request may succeed later without the client changing anything in it."""

    fault: Fault
    retryable: bool


_CLIENT = ErrorRule(Fault.CLIENT, retryable=False)
_CLIENT_LATER = ErrorRule(Fault.CLIENT, retryable=True)
_DAEMON_LATER = ErrorRule(Fault.DAEMON, retryable=True)
_ENGINE = ErrorRule(Fault.ENGINE, retryable=False)
_ENGINE_LATER = ErrorRule(Fault.ENGINE, retryable=True)

ERROR_RULES: dict[ErrorCode, ErrorRule] = {
    ErrorCode.MALFORMED_MESSAGE: _CLIENT,
    ErrorCode.MESSAGE_TOO_LARGE: _CLIENT,
    ErrorCode.UNSUPPORTED_VERSION: _CLIENT,
    ErrorCode.LIMIT_EXCEEDED: _CLIENT,
    ErrorCode.NO_SESSION: _CLIENT,
    ErrorCode.SESSION_LIMIT: _DAEMON_LATER,
    ErrorCode.WRITER_BUSY: _CLIENT_LATER,
    ErrorCode.STALE_EPOCH: _CLIENT,
    ErrorCode.DUPLICATE_REQUEST: _CLIENT,
    ErrorCode.UNKNOWN_REQUEST: _CLIENT,
    ErrorCode.PEER_NOT_ALLOWED: _CLIENT,
    ErrorCode.INVALID_DESCRIPTOR: _CLIENT,
    ErrorCode.MEMORY_UNAVAILABLE: _CLIENT,
    ErrorCode.WRONG_DEVICE: _CLIENT,
    ErrorCode.UNKNOWN_SOURCE: _CLIENT,
    ErrorCode.UNKNOWN_REFIT: _CLIENT,
    ErrorCode.MANIFEST_MISMATCH: _CLIENT,
    ErrorCode.PLAN_REQUIRED: _CLIENT,
    ErrorCode.NOT_FINITE: _CLIENT,
    ErrorCode.VERSION_NOT_INCREASING: _CLIENT,
    ErrorCode.REFIT_IN_PROGRESS: _CLIENT_LATER,
    ErrorCode.GROUP_INCOMPLETE: _CLIENT_LATER,
    ErrorCode.GROUP_MISMATCH: _CLIENT,
    ErrorCode.REFIT_FAILED: _ENGINE_LATER,
    ErrorCode.ATTEST_FAILED: _ENGINE_LATER,
    ErrorCode.INVALID_CHECKPOINT: _CLIENT,
    ErrorCode.NOTHING_TO_RESTORE: _CLIENT,
    ErrorCode.COLLECTIVE_FAILED: _CLIENT_LATER,
    ErrorCode.INVALID_ADAPTER: _CLIENT,
    ErrorCode.UNKNOWN_ADAPTER: _CLIENT,
    ErrorCode.INVALID_PROMPT: _CLIENT,
    ErrorCode.INVALID_SAMPLING: _CLIENT,
    ErrorCode.VERSION_UNAVAILABLE: _CLIENT_LATER,
    ErrorCode.TOO_MANY_REQUESTS: _DAEMON_LATER,
    ErrorCode.CANCELLED: _CLIENT,
    ErrorCode.ABORTED: _CLIENT_LATER,
    ErrorCode.DEADLINE_EXCEEDED: _CLIENT_LATER,
    ErrorCode.NOT_A_NUMBER: _ENGINE,
    ErrorCode.LOADING: _DAEMON_LATER,
    ErrorCode.TORN: _ENGINE_LATER,
    ErrorCode.ASLEEP: _CLIENT_LATER,
    ErrorCode.DRAINING: _DAEMON_LATER,
    ErrorCode.ENGINE_DEAD: _ENGINE,
    ErrorCode.ENGINE_ERROR: _ENGINE,
    ErrorCode.NOT_ALLOWED_NOW: _CLIENT,
    ErrorCode.CACHE_NOT_RESET: _ENGINE_LATER,
    ErrorCode.UNSUPPORTED: _CLIENT,
    ErrorCode.INTERNAL: ErrorRule(Fault.DAEMON, retryable=False),
}

MAX_MESSAGE_CHARACTERS = 4096


class ProtocolError(Exception):
    """A request that cannot be served; becomes a `Failed` reply.

    `details` holds message-pack natives with string keys (names, limits, shapes) for programs; `message` is for people
    and says what to do. It may quote what a client sent, however long: beyond MAX_MESSAGE_CHARACTERS it is cut off.
    """

    def __init__(self, code: ErrorCode, message: str, **details: object) -> None:
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = f"{message[: MAX_MESSAGE_CHARACTERS - 3]}..."
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    @property
    def fault(self) -> Fault:
        return ERROR_RULES[self.code].fault

    @property
    def retryable(self) -> bool:
        return ERROR_RULES[self.code].retryable

    def __str__(self) -> str:
        return f"{self.code.value}: {self.message}"
