"""One DEALER socket for the life of one connection: a link that broke is never used again, so nothing stale is sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from refit_protocol.codec import Frame
from refit_trainer.errors import DaemonUnreachable

_RECONNECT_MILLISECONDS = 50
_RECONNECT_MAX_MILLISECONDS = 1000
_REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
_BROKEN = zmq.Event.DISCONNECTED | zmq.Event.MONITOR_STOPPED
_WATCHED_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | _REFUSED | _BROKEN
_BATCH = 256
# As plain numbers: arithmetic with enumerations costs more than a send.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN, _POLLOUT, _RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.RCVMORE)


@dataclass(frozen=True)
class CurveKeys:
    """What a `tcp://` daemon wants: its public key and this client's pair, each as 40 characters of Z85."""

    server_public: bytes
    client_public: bytes
    client_secret: bytes


class LinkRefusedError(Exception):
    """The peer does not accept our keys, or is no ZeroMQ peer."""


class AddressRefusedError(ValueError):
    """No socket can be connected to this endpoint, or with these keys, however often it is tried."""


class _Watched:
    """A socket on the running event loop. Its descriptor says only that something may have changed, once: so the socket
    is looked at after each of its events and after each send."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._unsent: deque[tuple[Sequence[Frame], asyncio.Future[None]]] = deque()
        self._loop.add_reader(socket.fileno(), self._look)
        self._look_soon()

    def send(self, frames: Sequence[Frame]) -> asyncio.Future[None] | None:
        """What is to be awaited, None if the message is on its way already."""
        if not self._unsent and self._try_send(frames):
            return None
        sent = self._loop.create_future()
        self._unsent.append((frames, sent))
        return sent

    def close(self) -> None:
        """Closes the socket; what was not sent fails with `DaemonUnreachable`."""
        if self.socket.closed:
            return
        self._loop.remove_reader(self.socket.fileno())
        self.socket.close(linger=0)
        for _, sent in self._unsent:
            if not sent.done():
                sent.set_exception(DaemonUnreachable("the connection broke before the request was sent"))
        self._unsent.clear()

    def _look(self) -> None:
        self._scheduled = False
        for _ in range(_BATCH):
            if self.socket.closed:
                return
            events = int(self.socket.getsockopt(_EVENTS))
            if self._unsent and events & _POLLOUT:
                self._send_waiting()
            if not events & _POLLIN:
                return
            self._take(self._received())
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._look)

    def _received(self) -> list[bytes]:
        frames = [self.socket.recv(_NOBLOCK)]
        while self.socket.getsockopt(_RCVMORE):
            frames.append(self.socket.recv(_NOBLOCK))
        return frames

    def _send_waiting(self) -> None:
        while self._unsent:
            frames, sent = self._unsent[0]
            if not sent.done():
                if not self._try_send(frames):
                    return
                sent.set_result(None)
            self._unsent.popleft()

    def _try_send(self, frames: Sequence[Frame]) -> bool:
        try:
            # Only the first frame can be refused: a message is sent whole or not at all.
            for frame in frames[:-1]:
                self.socket.send(frame, _NOBLOCK_MORE)
            self.socket.send(frames[-1], _NOBLOCK)
        except zmq.Again:
            return False
        self._look_soon()
        return True


class Link:
    """Connects in the background from the start; `connected()` and `broken()` wait for either turn.

    `take` gets the frames of each message, without the delimiter, on the running event loop. Raises
    `AddressRefusedError`.
    """

    def __init__(
        self, context: zmq.Context[Any], endpoint: str, curve: CurveKeys | None, take: Callable[[list[bytes]], None]
    ) -> None:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        # Without a connection there is no queue in which a request could outlive the daemon it was meant for.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MILLISECONDS)
        self._events: asyncio.Queue[zmq.Event] = asyncio.Queue()
        self._monitor = _Watched(socket.get_monitor_socket(_WATCHED_EVENTS), self._note)
        self._messages = _Watched(socket, lambda frames: take(frames[1:]))
        try:
            _apply_curve(socket, curve)
            _connect(socket, endpoint)
        except BaseException:
            # The end of the context would wait for it.
            self.close()
            raise

    async def connected(self) -> None:
        """Returns once the peer has shaken hands, whenever that is; raises `LinkRefusedError` if it will not."""
        while (event := await self._events.get()) != zmq.Event.HANDSHAKE_SUCCEEDED:
            if event & _REFUSED:
                raise LinkRefusedError(f"the handshake failed: {event.name}")

    async def broken(self) -> None:
        """Returns when the connection is lost."""
        while not await self._events.get() & _BROKEN:
            pass

    async def send(self, frames: Sequence[Frame]) -> None:
        """Raises `DaemonUnreachable` if the link is closed, before or meanwhile."""
        if self._messages.socket.closed:
            raise DaemonUnreachable("the connection broke before the request was sent")
        if (sent := self._messages.send([b"", *frames])) is not None:
            await sent

    def close(self) -> None:
        if not self._messages.socket.closed:
            self._messages.socket.disable_monitor()
        self._monitor.close()
        self._messages.close()

    def _note(self, frames: list[bytes]) -> None:
        self._events.put_nowait(zmq.Event(parse_monitor_message(frames)["event"]))


def _apply_curve(socket: zmq.Socket[bytes], curve: CurveKeys | None) -> None:
    if curve is None:
        return
    try:
        socket.curve_serverkey = curve.server_public
        socket.curve_publickey = curve.client_public
        socket.curve_secretkey = curve.client_secret
    except (zmq.ZMQError, TypeError) as error:
        raise AddressRefusedError(f"curve: a key has to be 40 characters of Z85, as bytes: {error}") from None


def _connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise AddressRefusedError(f"endpoint {endpoint!r} is no ipc:///path and no tcp://host:port: {error}") from None
