"""Every message of protocol version 1 in the order of a session's life: commands from clients, facts from the daemon.

Bulk numbers travel in the blobs that follow the header (see each message); names of fields carry their units.

One room for each subject; whoever uses them imports from here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from refit_protocol.errors import ErrorCode, Fault, ProtocolError
from refit_protocol.messages import generation, kinds, looking, refits, service, sessions, sources
from refit_protocol.messages.generation import *
from refit_protocol.messages.kinds import *
from refit_protocol.messages.looking import *
from refit_protocol.messages.refits import *
from refit_protocol.messages.service import *
from refit_protocol.messages.sessions import *
from refit_protocol.messages.sources import *


class Failed(kinds.Fact, frozen=True, kw_only=True):
    """The request could not be served: whose fault, what to do, and whether the same request may work later."""

    code: ErrorCode
    fault: Fault
    message: str
    retryable: bool
    details: dict[str, Any] = {}

    @classmethod
    def from_error(cls, error: ProtocolError) -> Failed:
        return cls(
            code=error.code,
            fault=error.fault,
            message=error.message,
            retryable=error.retryable,
            details=dict(error.details),
        )


Request = (
    sessions.Commands | looking.Commands | sources.Commands | refits.Commands | generation.Commands | service.Commands
)
Reply = sessions.Facts | looking.Facts | sources.Facts | refits.Facts | generation.Facts | service.Facts | Failed


class RequestHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`id` is chosen by the client, rises within a session, and is never 0."""

    id: int
    body: Request
    session: str | None = None


class ReplyHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`id` names the request (0: see `TokensGenerated`); `last` ends its replies."""

    id: int
    body: Reply
    last: bool = True
