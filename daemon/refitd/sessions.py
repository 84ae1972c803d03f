"""Who is connected: sessions, their leases, and the death of their processes. No sockets: the server sends what is
answered.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

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
from refitd import __version__
from refitd.config import ServerConfig

HEARTBEATS_PER_LEASE = 4

log = structlog.get_logger()


@dataclass(eq=False)
class Session:
    """One connected client. `identity` is its latest connection: streamed tokens go there."""

    token: str
    client: str
    pid: int | None
    lease_seconds: float
    identity: bytes
    renewed: float
    last_request: int = 0
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    pidfd: int | None = None
    closed: bool = False

    def renew(self) -> None:
        self.renewed = time.monotonic()

    @property
    def expired(self) -> bool:
        return time.monotonic() > self.renewed + self.lease_seconds


@dataclass(frozen=True)
class Call:
    """One request on its way to a room. `session` is None for requests that need none."""

    identity: bytes
    id: int
    body: Command
    blobs: list[Frame]
    session: Session | None

    @property
    def owner(self) -> Session:
        assert self.session is not None
        return self.session

    @property
    def reply_to(self) -> bytes:
        """A stream follows its session to a new connection, other replies go back where the request came from."""
        follows = isinstance(self.body, Generate) and self.body.stream and self.session is not None
        return self.owner.identity if follows else self.identity


@dataclass(frozen=True)
class Answer:
    """One reply on its way to the client."""

    body: Reply
    blobs: tuple[Frame, ...] = ()
    last: bool = True


CloseHook = Callable[[Session, str], Awaitable[None]]


class Sessions:
    """Opens, renews, resumes and closes; `on_close` rooms give up what they hold for a session."""

    def __init__(self, config: ServerConfig, epoch: int) -> None:
        self._config = config
        self._epoch = epoch
        self._sessions: dict[str, Session] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.on_close: list[CloseHook] = []
        self.on_opened: Callable[[], None] = lambda: None
        self.on_ended: Callable[[str], None] = lambda _why: None
        self.model: ModelInfo | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

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
        session = self._resume(hello, call.identity) or self._open(hello, call.identity)
        return Answer(self._welcome(session, resumed=session.token == hello.resume))

    def heartbeat(self, call: Call) -> Answer:
        assert isinstance(call.body, Heartbeat)
        return Answer(HeartbeatAcknowledged(lease_seconds=call.owner.lease_seconds))

    def goodbye(self, call: Call) -> Answer:
        assert isinstance(call.body, Goodbye)
        self.close(call.owner, "goodbye")
        return Answer(SessionClosed())

    # --- the life of a session ----------------------------------------------------------------------------------------

    def admit(self, token: str | None, request_id: int) -> Session:
        """The session of a request, its lease renewed. Raises `no_session`, `duplicate_request` or `limit_exceeded`."""
        session = self._sessions.get(token or "")
        if session is None:
            raise ProtocolError(ErrorCode.NO_SESSION, "no such session: send Hello first (its lease may have ended)")
        if request_id <= session.last_request:
            raise ProtocolError(
                ErrorCode.DUPLICATE_REQUEST,
                f"request id {request_id} is not above {session.last_request}, the last one",
            )
        if len(session.tasks) >= self._config.max_requests_per_session:
            raise ProtocolError(
                ErrorCode.LIMIT_EXCEEDED, f"{len(session.tasks)} requests of this session are running already"
            )
        session.last_request = request_id
        session.renew()
        return session

    def close(self, session: Session, why: str) -> None:
        """Gives up all that the session holds; returns at once, the rooms clean up in tasks of their own."""
        if session.closed:
            return
        session.closed = True
        del self._sessions[session.token]
        self._unwatch(session)
        self.on_ended(why)
        log.info("session closed", client=session.client, pid=session.pid, why=why)
        task = asyncio.create_task(self._run_hooks(session, why), name="session-close")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close_all(self, why: str) -> None:
        for session in self:
            self.close(session, why)
        await asyncio.gather(*self._closing)

    async def expire(self) -> None:
        """Closes sessions whose lease has ended; runs until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._config.lease_seconds / HEARTBEATS_PER_LEASE))
            for session in self:
                if session.expired:
                    self.close(session, "lease ended")

    def _open(self, hello: Hello, identity: bytes) -> Session:
        if len(self._sessions) >= self._config.max_sessions:
            raise ProtocolError(ErrorCode.SESSION_LIMIT, f"{len(self._sessions)} sessions are open, the limit")
        lease = min(hello.lease_seconds or self._config.lease_seconds, self._config.max_lease_seconds)
        session = Session(
            token=secrets.token_hex(16),
            client=hello.client[:200],
            pid=hello.pid,
            lease_seconds=max(lease, 0.1),
            identity=identity,
            renewed=time.monotonic(),
        )
        self._watch(session)
        self._sessions[session.token] = session
        self.on_opened()
        log.info("session opened", client=session.client, pid=session.pid, lease_seconds=session.lease_seconds)
        return session

    def _resume(self, hello: Hello, identity: bytes) -> Session | None:
        session = self._sessions.get(hello.resume or "")
        if session is not None:
            session.identity = identity
            session.renew()
            log.info("session resumed", client=session.client, pid=session.pid)
        return session

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
        for hook in self.on_close:
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
        if session.pid <= 0:
            raise ProtocolError(ErrorCode.MALFORMED_MESSAGE, f"pid {session.pid} is not a process")
        self._check_user(session.pid)
        try:
            session.pidfd = os.pidfd_open(session.pid)
        except OSError as error:
            raise _no_such_peer(session.pid, error) from None
        asyncio.get_running_loop().add_reader(session.pidfd, self.close, session, "its process ended")

    def _check_user(self, pid: int) -> None:
        try:
            owner = os.stat(f"/proc/{pid}").st_uid
        except OSError as error:
            raise _no_such_peer(pid, error) from None
        if owner not in (os.getuid(), 0) and self._config.socket_group is None:
            raise ProtocolError(
                ErrorCode.PEER_NOT_ALLOWED, f"process {pid} belongs to user {owner}, the daemon to user {os.getuid()}"
            )

    def _unwatch(self, session: Session) -> None:
        if session.pidfd is not None:
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = None


def _no_such_peer(pid: int, error: OSError) -> ProtocolError:
    return ProtocolError(
        ErrorCode.PEER_NOT_ALLOWED,
        f"process {pid} is not visible to the daemon ({error.strerror}): do both share a PID namespace? "
        "Clients elsewhere leave pid out",
    )
