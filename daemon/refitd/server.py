"""The only file of the daemon that knows ZeroMQ: receive, decode, route to a room, send.

The receive loop never awaits a handler: short ones answer at once, the others run as tasks, so that a cancel or a
heartbeat
never waits behind a refit.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import structlog
import zmq

from refit_protocol.codec import CodecLimits, Frame, decode_request, encode_reply, salvage_request_id
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import Command, Failed, GetStatus, Hello, ReplyHeader, RequestHeader
from refitd.config import ServerConfig
from refitd.sessions import Answer, Call, Session, Sessions

SEND_HIGH_WATER_MARK = 1000
RECEIVE_BATCH = 256
RETRY_SECONDS = 0.01
ZMQ_HEARTBEAT_MILLISECONDS = 5_000
ZMQ_HEARTBEAT_TIMEOUT_MILLISECONDS = 20_000

InstantHandler = Callable[[Call], Answer]
LengthyHandler = Callable[[Call], AsyncIterator[Answer]]
WITHOUT_SESSION = (Hello, GetStatus)

log = structlog.get_logger()


class Server:
    """Bound from before the model loads until the daemon ends. All methods belong to the event loop's thread."""

    def __init__(
        self,
        config: ServerConfig,
        sessions: Sessions,
        instant: Mapping[type[Command], InstantHandler],
        lengthy: Mapping[type[Command], LengthyHandler],
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._instant = instant
        self._lengthy = lengthy
        self._limits = CodecLimits(header_bytes=config.max_header_bytes, blob_bytes=config.max_message_bytes)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._backlog: dict[bytes, deque[list[Frame]]] = {}
        self._receive_scheduled = False
        self._retry: asyncio.TimerHandle | None = None
        self.on_writable: Callable[[bytes], None] = lambda _identity: None
        self.on_answered: Callable[[str, float], None] = lambda _command, _seconds: None
        self.on_refused: Callable[[ErrorCode], None] = lambda _code: None
        self.on_dropped: Callable[[], None] = lambda: None
        self.tasks: set[asyncio.Task[None]] = set()

    def bind(self, endpoint: str) -> None:
        """The endpoint's lock must be held: see `endpoint.EndpointLock`."""
        socket = self._socket
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.ROUTER_HANDOVER, 1)
        socket.set(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        socket.set(zmq.LINGER, 200)
        socket.set(zmq.HEARTBEAT_IVL, ZMQ_HEARTBEAT_MILLISECONDS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, ZMQ_HEARTBEAT_TIMEOUT_MILLISECONDS)
        # A message somewhat over the limit gets a typed error; one far over it loses its connection unread.
        socket.set(zmq.MAXMSGSIZE, 4 * self._config.max_message_bytes)
        socket.bind(endpoint)
        asyncio.get_running_loop().add_reader(socket.fileno(), self._receive)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        if self._retry is not None:
            self._retry.cancel()
        self._socket.close()
        self._context.term()

    def can_send(self, identity: bytes) -> bool:
        """False while replies to this client wait: whoever can merge should wait for `on_writable`."""
        return identity not in self._backlog

    def send(self, identity: bytes, request_id: int, answer: Answer) -> None:
        """Never blocks. Replies to a client that does not read wait in its own queue, bounded."""
        header = ReplyHeader(id=request_id, body=answer.body, last=answer.last)
        self._send_frames(identity, [identity, b"", *encode_reply(header, answer.blobs)])

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        self._receive_scheduled = False
        for _ in range(RECEIVE_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._schedule_receive()

    def _schedule_receive(self) -> None:
        """The socket's descriptor is edge-triggered: after a send or a full batch it must be looked at again."""
        if not self._receive_scheduled:
            self._receive_scheduled = True
            asyncio.get_running_loop().call_soon(self._receive)

    def _take(self, frames: list[bytes]) -> None:
        identity, parts = frames[0], frames[1:]
        if parts and parts[0] == b"":
            parts = parts[1:]
        request_id = 0
        try:
            header, blobs = decode_request(parts, self._limits)
            request_id = header.id
            self._route(identity, header, blobs)
        except ProtocolError as error:
            self._refuse(identity, request_id or salvage_request_id(parts, self._limits), error)

    def _route(self, identity: bytes, header: RequestHeader, blobs: list[Frame]) -> None:
        if not 0 < header.id < 1 << 64:
            raise ProtocolError(ErrorCode.MALFORMED_MESSAGE, f"request id {header.id} is not in 1..2^64-1")
        session = None
        if not isinstance(header.body, WITHOUT_SESSION):
            session = self._sessions.admit(header.session, header.id)
        call = Call(identity, header.id, header.body, blobs, session)
        instant = self._instant.get(type(header.body))
        if instant is not None:
            started = time.monotonic()
            self.send(identity, header.id, instant(call))
            self.on_answered(type(header.body).__name__, time.monotonic() - started)
        else:
            self._start(call, self._lengthy[type(header.body)])

    def _start(self, call: Call, handler: LengthyHandler) -> None:
        task = asyncio.create_task(self._serve(call, handler), name=f"{type(call.body).__name__} {call.id}")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if call.session is not None:
            tasks = call.session.tasks
            tasks[call.id] = task
            task.add_done_callback(lambda _task: tasks.pop(call.id, None))

    async def _serve(self, call: Call, handler: LengthyHandler) -> None:
        started = time.monotonic()
        try:
            async for answer in handler(call):
                self.send(call.reply_to, call.id, answer)
            self.on_answered(type(call.body).__name__, time.monotonic() - started)
        except ProtocolError as error:
            self._refuse(call.reply_to, call.id, error)
        except asyncio.CancelledError:
            self._refuse(call.reply_to, call.id, ProtocolError(ErrorCode.CANCELLED, "the session or the daemon ended"))
            raise
        # The boundary of a request's task: a bug costs this request, and is logged with its traceback.
        except Exception as error:
            log.exception("request failed", request=call.id, command=type(call.body).__name__)
            self._refuse(
                call.reply_to, call.id, ProtocolError(ErrorCode.INTERNAL, f"bug in the daemon, see its log: {error}")
            )

    @property
    def queued(self) -> tuple[int, int, int]:
        """Replies waiting for clients that do not read: how many, their bytes, the bytes of the longest queue."""
        sizes = [sum(len(part) for frames in waiting for part in frames) for waiting in self._backlog.values()]
        return sum(map(len, self._backlog.values())), sum(sizes), max(sizes, default=0)

    def _refuse(self, identity: bytes, request_id: int, error: ProtocolError) -> None:
        self.on_refused(error.code)
        log.debug("request refused", request=request_id, code=error.code.value, reason=error.message)
        self.send(identity, request_id, Answer(Failed.from_error(error)))

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send_frames(self, identity: bytes, frames: list[Frame]) -> None:
        waiting = self._backlog.get(identity)
        if waiting is not None:
            self._queue(identity, waiting, frames)
        elif not self._try_send(identity, frames):
            self._queue(identity, self._backlog.setdefault(identity, deque()), frames)
        self._schedule_receive()

    def _try_send(self, identity: bytes, frames: Sequence[Frame]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            # The connection is gone. What can be resumed is kept by its room, what cannot has nobody to go to.
            self.on_dropped()
            self._backlog.pop(identity, None)
        return True

    def _queue(self, identity: bytes, waiting: deque[list[Frame]], frames: list[Frame]) -> None:
        if len(waiting) >= self._config.max_backlog_replies:
            self._give_up(identity, len(waiting))
            return
        waiting.append(frames)
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush_backlog)

    def _flush_backlog(self) -> None:
        self._retry = None
        for identity, waiting in list(self._backlog.items()):
            while waiting and self._try_send(identity, waiting[0]):
                waiting.popleft()
            if not waiting:
                self._backlog.pop(identity, None)
                self.on_writable(identity)
        if self._backlog and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush_backlog)

    def _give_up(self, identity: bytes, replies: int) -> None:
        """A client that has not read for that long loses its session: said in the log, not silently dropped."""
        log.warning("client does not read, its session is closed", waiting_replies=replies)
        self._backlog.pop(identity, None)
        for session in self._sessions_of(identity):
            self._sessions.close(session, f"{replies} replies unread")

    def _sessions_of(self, identity: bytes) -> list[Session]:
        return [session for session in self._sessions if session.identity == identity]
