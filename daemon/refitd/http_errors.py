"""Failures over HTTP: the status, and one body that OpenAI clients can read and programs can decide on."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.http_body import NoRoomError
from refitd.prefix import PrefixError, PrefixMismatchError

# Room is made whenever an answer ends.
RETRY_AFTER_SECONDS = 1

STATUS: dict[ErrorCode, HTTPStatus] = {
    ErrorCode.MALFORMED_MESSAGE: HTTPStatus.BAD_REQUEST,
    ErrorCode.MESSAGE_TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    ErrorCode.LIMIT_EXCEEDED: HTTPStatus.BAD_REQUEST,
    ErrorCode.INVALID_PROMPT: HTTPStatus.BAD_REQUEST,
    ErrorCode.INVALID_SAMPLING: HTTPStatus.BAD_REQUEST,
    ErrorCode.UNSUPPORTED: HTTPStatus.BAD_REQUEST,
    ErrorCode.PEER_NOT_ALLOWED: HTTPStatus.UNAUTHORIZED,
    ErrorCode.UNKNOWN_REQUEST: HTTPStatus.NOT_FOUND,
    ErrorCode.UNKNOWN_ADAPTER: HTTPStatus.NOT_FOUND,
    ErrorCode.TOO_MANY_REQUESTS: HTTPStatus.TOO_MANY_REQUESTS,
    ErrorCode.VERSION_UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.LOADING: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.TORN: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.ASLEEP: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.DRAINING: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.ENGINE_DEAD: HTTPStatus.SERVICE_UNAVAILABLE,
}


def status_of(error: ProtocolError) -> HTTPStatus:
    if isinstance(error, PrefixMismatchError):
        return HTTPStatus.CONFLICT
    if isinstance(error, NoRoomError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)


def error_body(error: ProtocolError) -> dict[str, object]:
    """`type` is the error code of the wire protocol, or what is wrong with a prefix."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind if isinstance(error, PrefixError) else error.code.value,
            "param": None,
            "code": status_of(error).value,
            "fault": error.fault.value,
            "retryable": error.retryable,
        }
    }


def error_response(error: ProtocolError) -> JSONResponse:
    """The header keeps OpenAI's clients, which repeat after any 409 or 5xx, from repeating what cannot succeed."""
    headers = {"x-should-retry": str(error.retryable).lower()}
    if isinstance(error, NoRoomError):
        headers["retry-after"] = str(RETRY_AFTER_SECONDS)
    return JSONResponse(error_body(error), status_of(error), headers=headers)
