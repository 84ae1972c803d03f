"""A client without the client library: one socket, frames in, frames out, as any language would have it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import zmq

from refit_protocol.codec import Frame, decode_reply, encode_request
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    Fact,
    Failed,
    Generate,
    GenerationFinished,
    Hello,
    Reply,
    ReplyHeader,
    Request,
    RequestHeader,
    Sampling,
    TokensGenerated,
    Welcome,
)

_Fact = TypeVar("_Fact", bound=Fact)

PATIENCE_MILLISECONDS = 30_000


class RawClient:
    """A DEALER socket that keeps count of request ids and of the session it was given."""

    def __init__(
        self, endpoint: str, *, identity: bytes | None = None, receive_queue: int = 0, reconnects: bool = True
    ) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, receive_queue)
        if not reconnects:
            self.socket.set(zmq.RECONNECT_IVL, -1)
        if identity is not None:
            self.socket.set(zmq.IDENTITY, identity)
        self.socket.connect(endpoint)
        self.session: str | None = None
        self.last = 0
        self.replies: list[tuple[ReplyHeader, list[Frame]]] = []

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def send_frames(self, *frames: Frame) -> None:
        self.socket.send_multipart(frames)

    def send(self, body: Request, blobs: Sequence[Frame] = (), *, id: int | None = None) -> int:  # noqa: A002
        """Returns the request's id."""
        self.last = self.last + 1 if id is None else id
        session = None if isinstance(body, Hello) else self.session
        self.send_frames(b"", *encode_request(RequestHeader(id=self.last, body=body, session=session), blobs))
        return self.last

    def receive(self, milliseconds: int = PATIENCE_MILLISECONDS) -> tuple[ReplyHeader, list[Frame]]:
        """The next message; raises TimeoutError."""
        if not self.socket.poll(milliseconds):
            raise TimeoutError(f"no reply within {milliseconds} ms")
        frames = self.socket.recv_multipart()
        assert frames[0] == b""
        return decode_reply(frames[1:])

    def reply_to(self, request: int) -> Reply:
        """Puts everything else that comes before it into `replies`."""
        while True:
            header, blobs = self.receive()
            if header.id == request:
                return header.body
            self.replies.append((header, blobs))

    def ask(self, body: Request, expected: type[_Fact], blobs: Sequence[Frame] = ()) -> _Fact:
        reply = self.reply_to(self.send(body, blobs))
        assert isinstance(reply, expected), reply
        return reply

    def refusal(self, body: Request, blobs: Sequence[Frame] = ()) -> ErrorCode:
        return self.ask(body, Failed, blobs).code

    def hello(self, **fields: Any) -> Welcome:
        fields = {"protocol_versions": [1], "client": "raw", **fields}
        welcome = self.ask(Hello(**fields), Welcome)
        self.session = welcome.session
        return welcome

    def generate(self, max_tokens: int, *, prompts: int = 1, stream: bool = True) -> int:
        ids = array("i", [1, 2, 3] * prompts).tobytes()
        command = Generate(prompt_lengths=[3] * prompts, sampling=Sampling(max_tokens=max_tokens), stream=stream)
        return self.send(command, [ids])

    def read_streams(self, requests: set[int]) -> dict[int, list[int]]:
        """Token ids by request, until all have finished; asserts that none is missing or comes twice."""
        tokens: dict[int, list[int]] = {request: [] for request in requests}
        unfinished = set(requests)
        while unfinished:
            header, blobs = self.replies.pop(0) if self.replies else self.receive()
            assert not isinstance(header.body, Failed), header
            if isinstance(header.body, TokensGenerated | GenerationFinished):
                take_tokens(tokens, header.body, blobs)
            if isinstance(header.body, GenerationFinished):
                unfinished.discard(header.id)
        return tokens


def take_tokens(
    tokens: dict[int, list[int]], body: TokensGenerated | GenerationFinished, blobs: Sequence[Frame]
) -> None:
    ids = array("i", bytes(blobs[0])) if blobs else array("i")
    for delta in body.deltas:
        known = tokens.setdefault(delta.request, [])
        assert delta.position == len(known), f"request {delta.request}: {delta.position} came after {len(known)}"
        known.extend(ids[: delta.count])
        del ids[: delta.count]
    assert not ids


@contextmanager
def raw_client(endpoint: str, **options: Any) -> Iterator[RawClient]:
    client = RawClient(endpoint, **options)
    try:
        yield client
    finally:
        client.close()
