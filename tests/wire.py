"""A client that speaks frames, for what the library would never send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import zmq

from refit_protocol.codec import Frame, decode_reply, encode_request
from refit_protocol.messages import (
    Failed,
    Goodbye,
    Hello,
    Reply,
    ReplyHeader,
    Request,
    RequestHeader,
    SessionClosed,
    Welcome,
)

REPLY_MILLISECONDS = 30_000

_Fact = TypeVar("_Fact")


class RawClient:
    """One DEALER connection with a session; every method waits for the one reply it causes."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._id = 0
        self.session: str | None = None

    def hello(self, **fields: Any) -> Welcome:
        welcome = self.ask(Hello(**{"protocol_versions": [1], "client": "raw", **fields}), Welcome)
        self.session = welcome.session
        return welcome

    def ask(self, body: Request, expected: type[_Fact], blobs: Sequence[Frame] = ()) -> _Fact:
        reply = self.send(body, blobs)
        assert isinstance(reply, expected), reply
        return reply

    def refused(self, body: Request, blobs: Sequence[Frame] = ()) -> Failed:
        return self.ask(body, Failed, blobs)

    def send(self, body: Request, blobs: Sequence[Frame] = ()) -> Reply:
        self.post(body, blobs)
        return self.receive().body

    def post(self, body: Request, blobs: Sequence[Frame] = ()) -> int:
        """Sends without waiting; returns the request's id."""
        self._id += 1
        header = RequestHeader(id=self._id, body=body, session=self.session)
        self._socket.send_multipart([b"", *encode_request(header, blobs)])
        return self._id

    def send_frames(self, frames: Sequence[Frame]) -> ReplyHeader:
        self._socket.send_multipart(frames)
        return self.receive()

    def receive(self) -> ReplyHeader:
        assert self._socket.poll(REPLY_MILLISECONDS), "no reply: the daemon dropped a request in silence"
        frames = self._socket.recv_multipart()
        return decode_reply(frames[1:] if frames[0] == b"" else frames)[0]


@contextmanager
def raw_client(endpoint: str) -> Iterator[RawClient]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    try:
        socket.connect(endpoint)
        client = RawClient(socket)
        yield client
        if client.session is not None:
            client.ask(Goodbye(), SessionClosed)
    finally:
        socket.close()
        context.term()
