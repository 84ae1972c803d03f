"""Who is connected: sessions, their leases, and the death of their processes. No sockets: the server sends the answers.

What may happen to a session when is `SESSION_TRANSITIONS` in `refit_protocol.states`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import structlog

from refit_protocol.codec import Frame
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    PROTOCOL_VERSION,
    Command,
    Generate,
    Goodbye,
    Heartbeat,
    HeartbeatAcknowledged,
    Hello,
    LimitInfo,
    ModelInfo,
    Reply,
    SessionClosed,
    Welcome,
)
from refit_protocol.states import SESSION_TRANSITIONS, SessionEvent, SessionState, step
from refitd import __version__
from refitd.config import ServerConfig
from refitd.peers import watch_process

HEARTBEATS_PER_LEASE = 3
MAX_CLIENT_NAME = 200

log = structlog.get_logger()


@dataclass(eq=False)
class Session:
    """One connected client. `identity` is the connection of its latest Hello: streamed tokens go there."""

    token: str
    client: str
    pid: int | None
    lease_seconds: float
    identity: bytes
    lease_end: float = 0.0
    state: SessionState = SessionState.ABSENT
    last_request: int = 0
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    pidfd: int | None = None
    process_ended: bool = False

    def step(self, event: SessionEvent) -> None:
        self.state = step(SESSION_TRANSITIONS, self.state, event)

    def renew(self) -> None:
        self.lease_end = time.monotonic() + self.lease_seconds

    @property
    def closed(self) -> bool:
        return self.state in (SessionState.CLOSING, SessionState.CLOSED)

    @property
    def connected(self) -> bool:
        return self.state is SessionState.OPEN


class Call(msgspec.Struct, frozen=True):
    """One request on its way to a room. `session` is None for requests that need none.

    The reply goes to connection `identity` with the frames `via` before its delimiter; `holder` is the session that
    said Hello over that connection last.
    """

    identity: bytes
    id: int
    body: Command
    blobs: list[Frame]
    session: Session | None
    via: tuple[bytes, ...] = ()
    holder: Session | None = None

    @property
    def owner(self) -> Session:
        assert self.session is not None
        return self.session

    @property
    def streams(self) -> bool:
        """A stream follows its session to a new connection, other replies go back where the request came from."""
        return isinstance(self.body, Generate) and self.body.stream


class Answer(msgspec.Struct, frozen=True):
    """One reply on its way to the client."""

    body: Reply
    blobs: tuple[Frame, ...] = ()
    last: bool = True


CloseHook = Callable[[Session, str], Awaitable[None]]


class Sessions:
    """Opens, renews, resumes and closes; `on_close` rooms give up what they hold for a session.

    `local`: clients are processes of this machine, which can be watched.
    """

    def __init__(self, config: ServerConfig, epoch: int, *, local: bool = True) -> None:
        self._config = config
        self._epoch = epoch
        self._local = local
        self._sessions: dict[str, Session] = {}
        self._holders: dict[bytes, Session] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.on_close: list[CloseHook] = []
        self.on_opened: Callable[[], None] = lambda: None
        self.on_resumed: Callable[[Session], None] = lambda _session: None
        self.on_ended: Callable[[str], None] = lambda _why: None
        self.model: ModelInfo | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def holder(self, identity: bytes) -> Session | None:
        """The open session that said Hello over this connection last."""
        return self._holders.get(identity)

    # --- requests -----------------------------------------------------------------------------------------------------

    def hello(self, call: Call) -> Answer:
        assert isinstance(call.body, Hello)
        hello = call.body
        if PROTOCOL_VERSION not in hello.protocol_versions:
            raise ProtocolError(
                ErrorCode.UNSUPPORTED_VERSION,
                f"this daemon speaks protocol version {PROTOCOL_VERSION}, the client {hello.protocol_versions}",
                supported=[PROTOCOL_VERSION],
            )
        session = self._sessions.get(hello.resume or "")
        resumed = session is not None
        if session is None:
            session = self._open(hello)
        self._attach(session, call.identity, SessionEvent.RESUMED if resumed else SessionEvent.HELLO)
        if resumed:
            self.on_resumed(session)
        log.info("session resumed" if resumed else "session opened", client=session.client, pid=session.pid)
        return Answer(self._welcome(session, resumed=resumed))

    def heartbeat(self, call: Call) -> Answer:
        assert isinstance(call.body, Heartbeat)
        return Answer(HeartbeatAcknowledged(lease_seconds=call.owner.lease_seconds))

    def goodbye(self, call: Call) -> Answer:
        assert isinstance(call.body, Goodbye)
        self.close(call.owner, SessionEvent.GOODBYE)
        return Answer(SessionClosed())

    # --- the life of a session ----------------------------------------------------------------------------------------

    def admit(self, token: str | None, request_id: int) -> Session:
        """The session of a request, its lease renewed. Raises `no_session` or `duplicate_request`."""
        session = self._sessions.get(token or "")
        if session is None:
            raise ProtocolError(ErrorCode.NO_SESSION, "no such session: its lease has ended (Hello begins another)")
        session.step(SessionEvent.REQUEST)
        session.renew()
        if request_id <= session.last_request:
            raise ProtocolError(
                ErrorCode.DUPLICATE_REQUEST,
                f"request id {request_id} is not above {session.last_request}, the last one",
                last=session.last_request,
            )
        session.last_request = request_id
        return session

    def check_room(self, session: Session) -> None:
        """Raises `limit_exceeded` where the session has too many requests under way to begin another."""
        if len(session.tasks) >= self._config.max_requests_per_session:
            raise ProtocolError(
                ErrorCode.LIMIT_EXCEEDED,
                f"{len(session.tasks)} requests of this session are under way, the limit",
                limit=self._config.max_requests_per_session,
            )

    def connection_lost(self, identity: bytes) -> None:
        """Nothing can be sent there any more: the session of that connection waits for its return."""
        session = self._holders.get(identity)
        if session is not None and session.connected:
            log.info("session detached", client=session.client, pid=session.pid)
            session.step(SessionEvent.CONNECTION_LOST)

    def returned(self, session: Session, identity: bytes) -> bool:
        """A request has come over the very connection that was thought lost: the session is open again."""
        back = session.state is SessionState.DETACHED and self._holders.get(identity) is session
        if back:
            session.step(SessionEvent.RETURNED)
        return back

    def close(self, session: Session, why: SessionEvent) -> None:
        """Gives up all that the session holds; returns at once, the rooms clean up in tasks of their own."""
        if session.closed:
            return
        session.step(why)
        session.process_ended = why is SessionEvent.PROCESS_ENDED
        del self._sessions[session.token]
        self._detach(session)
        self._unwatch(session)
        self.on_ended(why.value)
        log.info("session closed", client=session.client, pid=session.pid, why=why.value)
        task = asyncio.create_task(self._run_hooks(session, why.value), name="session-close")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close_all(self) -> None:
        for session in self:
            self.close(session, SessionEvent.DAEMON_STOPPED)
        await asyncio.gather(*self._closing)

    async def expire(self) -> None:
        """Closes sessions whose lease has ended; runs until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._config.lease_seconds / HEARTBEATS_PER_LEASE))
            now = time.monotonic()
            for session in [session for session in self._sessions.values() if session.lease_end < now]:
                self.close(session, SessionEvent.LEASE_ENDED)

    def _open(self, hello: Hello) -> Session:
        if len(self._sessions) >= self._config.max_sessions:
            raise ProtocolError(
                ErrorCode.SESSION_LIMIT,
                f"{len(self._sessions)} sessions are open, the limit",
                limit=self._config.max_sessions,
            )
        session = Session(
            token=secrets.token_hex(16),
            client=hello.client[:MAX_CLIENT_NAME],
            pid=hello.pid,
            lease_seconds=self._lease(hello),
            identity=b"",
        )
        session.renew()
        self._watch(session)
        self._sessions[session.token] = session
        self.on_opened()
        return session

    def _lease(self, hello: Hello) -> float:
        """Whose death is noticed anyway needs to give fewer signs of life."""
        wanted = hello.lease_seconds
        if wanted is None:
            return self._config.lease_seconds if hello.pid is None else self._config.watched_lease_seconds
        if not wanted > 0:
            raise ProtocolError(ErrorCode.MALFORMED_MESSAGE, f"a lease of {wanted:g} s is not possible")
        return max(self._config.min_lease_seconds, min(wanted, self._config.max_lease_seconds))

    def _attach(self, session: Session, identity: bytes, event: SessionEvent) -> None:
        """The connection now belongs to this session alone."""
        holder = self._holders.get(identity)
        if holder is not None and holder is not session:
            log.info("session detached: its identity is used by another", client=holder.client, pid=holder.pid)
            self._detach(holder)
            if holder.connected:
                holder.step(SessionEvent.IDENTITY_TAKEN)
        self._detach(session)
        session.step(event)
        session.identity = identity
        session.renew()
        self._holders[identity] = session

    def _detach(self, session: Session) -> None:
        if self._holders.get(session.identity) is session:
            del self._holders[session.identity]

    def _welcome(self, session: Session, *, resumed: bool) -> Welcome:
        config = self._config
        return Welcome(
            protocol_version=PROTOCOL_VERSION,
            daemon_version=__version__,
            session=session.token,
            resumed=resumed,
            epoch=self._epoch,
            lease_seconds=session.lease_seconds,
            heartbeat_seconds=session.lease_seconds / HEARTBEATS_PER_LEASE,
            limits=LimitInfo(
                message_bytes=config.max_message_bytes,
                requests_per_session=config.max_requests_per_session,
                prompts_per_request=config.max_prompts_per_request,
                bucket_pieces=config.max_bucket_pieces,
                buffered_bytes=config.max_buffered_bytes,
            ),
            model=self.model,
        )

    async def _run_hooks(self, session: Session, why: str) -> None:
        for task in list(session.tasks.values()):
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*(self._run_hook(hook, session, why) for hook in self.on_close))
        session.step(SessionEvent.RELEASED)

    async def _run_hook(self, hook: CloseHook, session: Session, why: str) -> None:
        try:
            await hook(session, why)
        # The boundary of a clean-up: one room's bug must not keep another from letting go.
        except Exception:
            log.exception("session clean-up failed", client=session.client)

    # --- peers --------------------------------------------------------------------------------------------------------

    def _watch(self, session: Session) -> None:
        """A local peer's death is seen at once through its pidfd; others are left to the lease."""
        if session.pid is None:
            return
        if not self._local:
            raise ProtocolError(
                ErrorCode.PEER_NOT_ALLOWED, "pid is for clients on this machine, over ipc: leave it out"
            )
        session.pidfd = watch_process(session.pid, self._config.socket_group)
        asyncio.get_running_loop().add_reader(session.pidfd, self.close, session, SessionEvent.PROCESS_ENDED)

    def _unwatch(self, session: Session) -> None:
        if session.pidfd is not None:
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = None
