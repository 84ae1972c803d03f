"""The bodies of requests: how large one may be, and all of them together, refused before they take the memory."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from refit_protocol.errors import ErrorCode, ProtocolError


class NoRoomError(ProtocolError):
    """The bodies of other requests leave no room for this one, until some of them are answered."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            ErrorCode.TOO_MANY_REQUESTS,
            f"the bodies of all requests under way would be larger than http.max_total_body_bytes = {limit_bytes}",
        )


class BodyRoom:
    """Room for the bodies of all requests that are read or answered at a time."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Raises `NoRoomError`, and takes nothing then."""
        if self._taken_bytes + size_bytes > self._limit_bytes:
            raise NoRoomError(self._limit_bytes)
        self._taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self._taken_bytes -= size_bytes


@dataclass
class BodyShare:
    """What one request has of the room; given back at the end of its `with`."""

    room: BodyRoom
    size_bytes: int = 0

    def grow_to(self, size_bytes: int) -> None:
        """Raises `NoRoomError`."""
        if size_bytes > self.size_bytes:
            self.room.take(size_bytes - self.size_bytes)
            self.size_bytes = size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.room.give_back(self.size_bytes)


async def read_body(scope: Scope, receive: Receive, limit_bytes: int, share: BodyShare) -> bytes:
    """Raises `message_too_large` or `NoRoomError`, where the length is announced before a byte of it is read."""
    announced = Headers(scope=scope).get("content-length", "0")
    if announced.isdecimal():
        _claim(int(announced), limit_bytes, share)
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ProtocolError(ErrorCode.CANCELLED, "the client left before its request was complete")
        part = message.get("body", b"")
        _claim(len(body) + len(part), limit_bytes, share)
        body += part
        more = message.get("more_body", False)
    return bytes(body)


def _claim(size_bytes: int, limit_bytes: int, share: BodyShare) -> None:
    if size_bytes > limit_bytes:
        raise ProtocolError(ErrorCode.MESSAGE_TOO_LARGE, f"the body is larger than http.max_body_bytes = {limit_bytes}")
    share.grow_to(size_bytes)
