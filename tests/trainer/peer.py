"""A ROUTER on a thread that speaks the real protocol, for what no daemon does on demand: silence, nonsense."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zmq

from refit_protocol.codec import Frame, decode_request, encode_reply
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    PROTOCOL_VERSION,
    Failed,
    GenerationFinished,
    GenerationStarted,
    Goodbye,
    Heartbeat,
    HeartbeatAcknowledged,
    Hello,
    LimitInfo,
    ModelInfo,
    Reply,
    ReplyHeader,
    Request,
    ResolvedSampling,
    SessionClosed,
    Status,
    TokenDelta,
    TokensGenerated,
    VersionRun,
    Welcome,
)
from refit_protocol.states import EngineState

# Some wait for a process that is yet to start, on a machine with many busy ones.
PATIENCE_SECONDS = 60.0
MODEL = ModelInfo(name="tiny", vocab_size=512, max_model_len=256, dtype="bfloat16", eos_token_ids=[2])
LIMITS = LimitInfo(
    message_bytes=1 << 28,
    requests_per_session=1024,
    prompts_per_request=4096,
    bucket_pieces=1 << 16,
    buffered_bytes=1 << 28,
)
RESOLVED = ResolvedSampling(max_tokens=[8], clamped=[False], stop_token_ids=[2], logprobs_mode="processed_logprobs")
STATUS = Status(
    daemon_version="0",
    pid=1,
    epoch=1,
    state=EngineState.READY,
    model=MODEL,
    version=3,
    digest=None,
    digest_mode="off",
    sleep_level=0,
    asleep_tags=[],
    progress=1.0,
    sessions=1,
    writer=None,
    running_requests=0,
    waiting_requests=0,
    restorable_version=None,
    last_refit=None,
    last_error=None,
    uptime_seconds=1.0,
    logprobs_mode="processed_logprobs",
)
FINISHED = GenerationFinished(
    deltas=[],
    outputs=1,
    prompt_tokens=2,
    generated_tokens=4,
    resolved=RESOLVED,
    first_token_milliseconds=1.0,
    total_milliseconds=2.0,
)


@dataclass
class Asked:
    """A request as the peer saw it; `reply` answers it, any number of times."""

    peer: Peer
    identity: bytes
    id: int
    session: str | None
    body: Request
    blobs: Sequence[Frame]

    def reply(self, body: Reply, *, blobs: Sequence[Frame] = (), last: bool = True, id: int | None = None) -> None:  # noqa: A002
        header = ReplyHeader(id=self.id if id is None else id, body=body, last=last)
        self.peer.send([self.identity, b"", *encode_reply(header, blobs)])

    def fail(self, code: ErrorCode, message: str = "no") -> None:
        self.reply(Failed.from_error(ProtocolError(code, message)))


@dataclass
class Peer:
    """Greets, acknowledges heartbeats and says goodbye by itself; the test answers all else from `asked`."""

    endpoint: str
    epoch: int = 1
    lease_seconds: float = 30.0
    heartbeat_seconds: float = 10.0
    keeps_sessions: bool = True
    answers_heartbeats: bool = True
    answers_hello: bool = True
    refuses_hello: ErrorCode | None = None
    asked: queue.Queue[Asked] = field(default_factory=queue.Queue)
    hellos: list[Hello] = field(default_factory=list)
    goodbyes: int = 0
    heartbeats: queue.Queue[Asked] = field(default_factory=queue.Queue)
    answer: Callable[[Asked], None] | None = None
    _greeted: queue.Queue[Hello] = field(default_factory=queue.Queue)
    _outgoing: queue.SimpleQueue[list[Frame] | None] = field(default_factory=queue.SimpleQueue)

    def next(self, kind: type[Request] | None = None) -> Asked:
        """The next request that the test has to answer."""
        asked = self.asked.get(timeout=PATIENCE_SECONDS)
        assert kind is None or isinstance(asked.body, kind), asked.body
        return asked

    def wait_for_hellos(self, number: int) -> None:
        """Returns when that many have come in all."""
        while len(self.hellos) < number:
            self._greeted.get(timeout=PATIENCE_SECONDS)

    def send(self, frames: list[Frame]) -> None:
        """From any thread."""
        self._put(frames)

    def start(self) -> None:
        self._context = zmq.Context()
        # No socket: both the test's thread and the peer's own wake it, and it must not wait for a peer that has ended.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(self.endpoint)
        self._thread = threading.Thread(target=self._serve, name="peer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Closes the socket, as a daemon that dies does."""
        self._put(None)
        self._thread.join()
        os.close(self._wake)
        self._wake = -1
        self._context.term()

    def _put(self, frames: list[Frame] | None) -> None:
        self._outgoing.put(frames)
        os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        with self._router:
            while self._step(dict(poller.poll())):
                pass

    def _step(self, ready: dict[object, int]) -> bool:
        """False once it has been stopped."""
        if self._wake in ready:
            os.eventfd_read(self._wake)
            while not self._outgoing.empty():
                if (frames := self._outgoing.get()) is None:
                    return False
                self._router.send_multipart(frames)
        if self._router in ready:
            self._handle(self._router.recv_multipart())
        return True

    def _handle(self, frames: list[bytes]) -> None:
        identity, delimiter, *rest = frames
        assert delimiter == b""
        header, blobs = decode_request(rest)
        asked = Asked(self, identity, header.id, header.session, header.body, blobs)
        if isinstance(header.body, Hello):
            self._greet(asked, header.body)
        elif isinstance(header.body, Goodbye):
            self.goodbyes += 1
            asked.reply(SessionClosed())
        elif isinstance(header.body, Heartbeat):
            self.heartbeats.put(asked)
            if self.answers_heartbeats:
                asked.reply(HeartbeatAcknowledged(lease_seconds=self.lease_seconds))
        elif self.answer is not None:
            self.answer(asked)
        else:
            self.asked.put(asked)

    def _greet(self, asked: Asked, hello: Hello) -> None:
        self.hellos.append(hello)
        self._greeted.put(hello)
        if self.refuses_hello is not None:
            asked.fail(self.refuses_hello)
        elif self.answers_hello:
            self._welcome(asked, hello)

    def _welcome(self, asked: Asked, hello: Hello) -> None:
        resumed = self.keeps_sessions and hello.resume == f"session-of-epoch-{self.epoch}"
        welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            daemon_version="0",
            session=f"session-of-epoch-{self.epoch}",
            resumed=resumed,
            epoch=self.epoch,
            lease_seconds=self.lease_seconds,
            heartbeat_seconds=self.heartbeat_seconds,
            limits=LIMITS,
            model=MODEL,
        )
        asked.reply(welcome)


@contextmanager
def running(peer: Peer) -> Iterator[Peer]:
    peer.start()
    try:
        yield peer
    finally:
        peer.stop()


def endpoint_in(directory: Path) -> str:
    return f"ipc://{directory / 'refitd.sock'}"


def send_tokens(asked: Asked, position: int, token_ids: list[int], *, last: bool = False) -> None:
    delta = TokenDelta(
        request=asked.id,
        prompt=0,
        output=0,
        position=position,
        count=len(token_ids),
        versions=[VersionRun(3, len(token_ids))],
        finish_reason="length" if last else None,
    )
    blobs = [np.array(token_ids, "<i4").tobytes(), np.full(len(token_ids), -0.5, "<f4").tobytes()]
    asked.reply(TokensGenerated(deltas=[delta]), blobs=blobs, last=False, id=0)


def begin_stream(asked: Asked) -> Asked:
    asked.reply(GenerationStarted(resolved=RESOLVED, prompt_lengths=[2]), last=False)
    return asked
