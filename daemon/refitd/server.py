"""The only file of the daemon that knows ZeroMQ: receive, decode, route to a room, send.

The receive loop never awaits a handler: short ones answer at once, the others run as tasks, so that a cancel or a
heartbeat never waits behind a refit.
"""

from __future__ import annotations

import asyncio
import errno
import grp
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
import zmq

from refit_protocol.codec import CodecLimits, Frame, decode_request, encode_reply, salvage_request_id
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import Command, Failed, GetStatus, Hello, ReplyHeader, RequestHeader
from refit_protocol.states import SessionEvent
from refitd.config import ServerConfig
from refitd.curve import CurveAccess
from refitd.endpoint import EndpointError
from refitd.log import bind
from refitd.peers import ROOT
from refitd.sessions import Answer, Call, Session, Sessions

# Small: what waits here cannot be merged or counted any more.
SEND_HIGH_WATER_MARK = 128
RECEIVE_BATCH = 256
LINGER_MILLISECONDS = 1000
FIRST_RETRY_SECONDS = 0.001
LAST_RETRY_SECONDS = 0.05
ZMQ_HEARTBEAT_MILLISECONDS = 10_000
ZMQ_HEARTBEAT_TIMEOUT_MILLISECONDS = 30_000
# Frames between the identity and the empty delimiter: a REQ socket's correlation id, the identities of proxies.
MAX_VIA_FRAMES = 4
MAX_VIA_BYTES = 256
# As plain numbers: arithmetic with enumerations costs more than the send itself.
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS, POLLIN, RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)

InstantHandler = Callable[[Call], Answer]
LengthyHandler = Callable[[Call], AsyncIterator[Answer]]
WITHOUT_SESSION = (Hello, GetStatus)

log = structlog.get_logger()


@dataclass
class Backlog:
    """Replies that one connection does not take at present."""

    messages: deque[Sequence[Frame]] = field(default_factory=deque)
    size_bytes: int = 0

    def append(self, frames: Sequence[Frame]) -> None:
        self.messages.append(frames)
        self.size_bytes += sum(map(len, frames))

    def popleft(self) -> None:
        self.size_bytes -= sum(map(len, self.messages.popleft()))


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
        self._curve: CurveAccess | None = None
        self._backlogs: dict[bytes, Backlog] = {}
        self._receive_scheduled = False
        self._retry: asyncio.TimerHandle | None = None
        self._retry_seconds = FIRST_RETRY_SECONDS
        self.on_writable: Callable[[bytes], None] = lambda _identity: None
        self.on_answered: Callable[[str, float], None] = lambda _command, _seconds: None
        self.on_refused: Callable[[ErrorCode], None] = lambda _code: None
        self.on_dropped: Callable[[], None] = lambda: None
        self.undelivered_replies = 0
        self.tasks: set[asyncio.Task[None]] = set()

    def bind(self, endpoint: str) -> None:
        """The endpoint's lock must be held: see `endpoint.EndpointLock`."""
        socket = self._socket
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.ROUTER_HANDOVER, 1)
        socket.set(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        socket.set(zmq.LINGER, LINGER_MILLISECONDS)
        self._admit_clients(endpoint)
        # A message somewhat over the limit gets a typed error; one far over it loses its connection unread.
        socket.set(zmq.MAXMSGSIZE, 4 * self._config.max_message_bytes)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise EndpointError(f"endpoint {endpoint}: {error.strerror}") from None
        asyncio.get_running_loop().add_reader(socket.fileno(), self._receive)

    async def flush(self, timeout_seconds: float) -> None:
        """Waits, bounded, until clients that read have taken the replies that wait for them."""
        deadline = time.monotonic() + timeout_seconds
        # The retry timer does the work; nobody would set an event once the last client has hung up.
        while self._backlogs and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LAST_RETRY_SECONDS)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        if self._retry is not None:
            self._retry.cancel()
        self._socket.close()
        if self._curve is not None:
            self._curve.close()
        self._context.term()

    def can_send(self, session: Session) -> bool:
        """False while nothing more can be sent to this client: whoever can merge should wait for `on_writable`."""
        return session.connected and session.identity not in self._backlogs

    @property
    def queued(self) -> tuple[int, int, int]:
        """Replies waiting for clients that do not read: how many, their bytes, the bytes of the longest queue."""
        backlogs = self._backlogs.values()
        sizes = [backlog.size_bytes for backlog in backlogs]
        return sum(len(backlog.messages) for backlog in backlogs), sum(sizes), max(sizes, default=0)

    def waiting_bytes(self, identity: bytes) -> int:
        """Of replies that this connection does not take at present."""
        backlog = self._backlogs.get(identity)
        return 0 if backlog is None else backlog.size_bytes

    def send(self, identity: bytes, request_id: int, answer: Answer, via: Sequence[bytes] = ()) -> None:
        """Never blocks. Replies to a client that does not read wait in its own queue, bounded."""
        header = ReplyHeader(id=request_id, body=answer.body, last=answer.last)
        self._send_frames(identity, [identity, *via, b"", *encode_reply(header, answer.blobs)])

    def _admit_clients(self, endpoint: str) -> None:
        """Over tcp keys decide. Over ipc the kernel says who connects: modes are not all that keeps users apart."""
        if not endpoint.startswith("ipc://"):
            self._curve = CurveAccess(self._context, self._config)
            self._curve.secure(self._socket)
            # A host that vanishes says nothing; a local process that ends closes its sockets.
            self._socket.set(zmq.HEARTBEAT_IVL, ZMQ_HEARTBEAT_MILLISECONDS)
            self._socket.set(zmq.HEARTBEAT_TIMEOUT, ZMQ_HEARTBEAT_TIMEOUT_MILLISECONDS)
            return
        for user in {os.getuid(), ROOT}:
            self._socket.set(zmq.IPC_FILTER_UID, user)
        if self._config.socket_group is not None:
            self._socket.set(zmq.IPC_FILTER_GID, grp.getgrnam(self._config.socket_group).gr_gid)

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        # Answers that are sent meanwhile need not schedule anything: the socket is looked at after each.
        self._receive_scheduled = True
        if self._socket.closed:
            return
        for _ in range(RECEIVE_BATCH):
            if not self._readable():
                self._receive_scheduled = False
                return
            self._take(self._next_message())
        self._receive_scheduled = False
        self._schedule_receive()

    def _readable(self) -> bool:
        """Asked before every message: an exception that says that there is none costs four times as much."""
        return bool(int(self._socket.getsockopt(EVENTS)) & POLLIN)

    def _next_message(self) -> list[bytes]:
        frames = [self._socket.recv(NOBLOCK)]
        while self._socket.getsockopt(RCVMORE):
            frames.append(self._socket.recv(NOBLOCK))
        return frames

    def _schedule_receive(self) -> None:
        """The socket's descriptor is edge-triggered: after a send or a full batch it must be looked at again."""
        if not self._receive_scheduled:
            self._receive_scheduled = True
            asyncio.get_running_loop().call_soon(self._receive)

    def _take(self, frames: list[bytes]) -> None:
        identity, via, parts = split_envelope(frames)
        request_id = 0
        try:
            header, blobs = decode_request(parts, self._limits)
            request_id = header.id
            self._route(self._call(identity, via, header, blobs))
        except ProtocolError as error:
            self._refuse(identity, via, request_id or salvage_request_id(parts, self._limits), error)
        # The boundary of a message: a bug costs this request, and the loop goes on.
        except Exception as error:
            log.exception("request failed", request=request_id)
            self._refuse(identity, via, request_id, _bug(error))

    def _call(self, identity: bytes, via: tuple[bytes, ...], header: RequestHeader, blobs: list[Frame]) -> Call:
        if not 0 < header.id < 1 << 64:
            raise ProtocolError(ErrorCode.MALFORMED_MESSAGE, f"request id {header.id} is not in 1..2^64-1")
        session = None
        if not isinstance(header.body, WITHOUT_SESSION):
            session = self._sessions.admit(header.session, header.id)
            if not session.connected and self._sessions.returned(session, identity):
                self.on_writable(identity)
        return Call(identity, header.id, header.body, blobs, session, via, self._sessions.holder(identity))

    def _route(self, call: Call) -> None:
        instant = self._instant.get(type(call.body))
        if instant is not None:
            started = time.monotonic()
            self.send(call.identity, call.id, instant(call), call.via)
            self.on_answered(type(call.body).__name__, time.monotonic() - started)
            return
        lengthy = self._lengthy.get(type(call.body))
        if lengthy is None:
            raise ProtocolError(ErrorCode.UNSUPPORTED, f"this daemon does not serve {type(call.body).__name__}")
        self._start(call, lengthy)

    def _start(self, call: Call, handler: LengthyHandler) -> None:
        if call.session is not None:
            self._sessions.check_room(call.session)
        task = asyncio.create_task(self._serve(call, handler), name=f"{type(call.body).__name__} {call.id}")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if call.session is not None:
            tasks = call.session.tasks
            tasks[call.id] = task
            task.add_done_callback(lambda _task: tasks.pop(call.id, None))

    async def _serve(self, call: Call, handler: LengthyHandler) -> None:
        started = time.monotonic()
        # They end with the task, which has a context of its own.
        bind(**_log_ids(call))
        try:
            async for answer in handler(call):
                self._reply(call, answer)
            self.on_answered(type(call.body).__name__, time.monotonic() - started)
        except ProtocolError as error:
            self._fail(call, error)
        except asyncio.CancelledError:
            self._fail(call, ProtocolError(ErrorCode.CANCELLED, "the session or the daemon ended"))
            raise
        # The boundary of a request's task: a bug costs this request, and is logged with its traceback.
        except Exception as error:
            log.exception("request failed", request=call.id, command=type(call.body).__name__)
            self._fail(call, _bug(error))

    def _reply(self, call: Call, answer: Answer) -> None:
        """An answer that comes late must not reach another client, which may use the same identity and ids."""
        if answer.last and call.session is not None:
            # Before the client can know, so that its next request finds the room.
            call.session.tasks.pop(call.id, None)
        if call.streams and call.owner.connected:
            self.send(call.owner.identity, call.id, answer)
        elif not call.streams and not self._stale(call):
            self.send(call.identity, call.id, answer, call.via)
        else:
            self._dropped()

    def _fail(self, call: Call, error: ProtocolError) -> None:
        self._note_refusal(call.id, error)
        self._reply(call, Answer(Failed.from_error(error)))

    def _stale(self, call: Call) -> bool:
        holder = self._sessions.holder(call.identity)
        return (holder is not None and holder is not call.holder) or (
            call.session is not None and call.session.process_ended
        )

    def _refuse(self, identity: bytes, via: Sequence[bytes], request_id: int, error: ProtocolError) -> None:
        self._note_refusal(request_id, error)
        self.send(identity, request_id, Answer(Failed.from_error(error)), via)

    def _note_refusal(self, request_id: int, error: ProtocolError) -> None:
        self.on_refused(error.code)
        log.debug("request refused", request=request_id, code=error.code.value, reason=error.message)

    def _dropped(self) -> None:
        self.undelivered_replies += 1
        self.on_dropped()

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send_frames(self, identity: bytes, frames: Sequence[Frame]) -> None:
        backlog = self._backlogs.get(identity)
        if backlog is not None:
            self._queue(identity, backlog, frames)
        elif not self._try_send(identity, frames):
            backlog = self._backlogs[identity] = Backlog()
            self._queue(identity, backlog, frames)

    def _try_send(self, identity: bytes, frames: Sequence[Frame]) -> bool:
        # Whether it is sent or not, ZeroMQ may take note of a message that has come, and its descriptor is silent then.
        self._schedule_receive()
        try:
            # Only the first frame, the identity, can be refused: a message is sent whole or not at all.
            for frame in frames[:-1]:
                self._socket.send(frame, NOBLOCK_MORE)
            self._socket.send(frames[-1], NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            # The connection is gone. What can be resumed is kept by its room, what cannot has nobody to go to.
            self._dropped()
            self._sessions.connection_lost(identity)
        return True

    def _queue(self, identity: bytes, backlog: Backlog, frames: Sequence[Frame]) -> None:
        backlog.append(frames)
        if len(backlog.messages) > self._config.max_backlog_replies or backlog.size_bytes > self._backlog_limit(
            backlog
        ):
            self._give_up(identity, backlog)
        elif self._retry is None:
            self._retry_in(FIRST_RETRY_SECONDS)

    def _backlog_limit(self, backlog: Backlog) -> int:
        """One reply may have any size: a client that only has to read it is not given up."""
        return self._config.max_backlog_bytes if len(backlog.messages) > 1 else sys.maxsize

    def _retry_in(self, seconds: float) -> None:
        self._retry_seconds = seconds
        self._retry = asyncio.get_running_loop().call_later(seconds, self._flush_backlogs)

    def _flush_backlogs(self) -> None:
        self._retry = None
        progress = [self._flush_backlog(identity, backlog) for identity, backlog in list(self._backlogs.items())]
        if self._backlogs and self._retry is None:
            wait = FIRST_RETRY_SECONDS if any(progress) else min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            self._retry_in(wait)

    def _flush_backlog(self, identity: bytes, backlog: Backlog) -> bool:
        """Whether anything could be sent."""
        before = len(backlog.messages)
        while backlog.messages and self._try_send(identity, backlog.messages[0]):
            backlog.popleft()
        if not backlog.messages:
            self._backlogs.pop(identity, None)
            self.on_writable(identity)
        return len(backlog.messages) < before

    def _give_up(self, identity: bytes, backlog: Backlog) -> None:
        """A client that has not read for that long loses its session: said in the log, not silently dropped."""
        log.warning(
            "client does not read, its session is closed",
            waiting_replies=len(backlog.messages),
            waiting_bytes=backlog.size_bytes,
        )
        del self._backlogs[identity]
        session = self._sessions.holder(identity)
        if session is not None:
            self._sessions.close(session, SessionEvent.UNREAD)


def _log_ids(call: Call) -> dict[str, int]:
    """What every line logged for a request carries, also by the tasks that it starts."""
    refit = getattr(call.body, "refit", None)
    return {"request": call.id} if refit is None else {"request": call.id, "refit": refit}


def split_envelope(frames: list[bytes]) -> tuple[bytes, tuple[bytes, ...], list[bytes]]:
    """Identity, the frames up to the empty delimiter, and the message behind it (nothing, if there is no delimiter)."""
    if len(frames) > 1 and not frames[1]:
        return frames[0], (), frames[2:]
    for index, frame in enumerate(frames[1 : 2 + MAX_VIA_FRAMES], start=1):
        if not frame:
            return frames[0], tuple(frames[1:index]), frames[index + 1 :]
        if len(frame) > MAX_VIA_BYTES:
            break
    return frames[0], (), []


def _bug(error: Exception) -> ProtocolError:
    return ProtocolError(ErrorCode.INTERNAL, f"bug in the daemon, see its log: {error}")
