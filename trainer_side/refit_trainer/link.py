"""One DEALER socket for the life of one connection: a link that broke is never used again, so nothing stale is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from refit_protocol.codec import Frame
from refit_trainer.errors import DaemonUnreachable

_RECONNECT_MILLISECONDS = 50
_RECONNECT_MAX_MILLISECONDS = 1000
_REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
_BROKEN = zmq.Event.DISCONNECTED | zmq.Event.MONITOR_STOPPED


@dataclass(frozen=True)
class CurveKeys:
    """What a `tcp://` daemon wants: its public key and this client's pair, each as 40 characters of Z85."""

    server_public: bytes
    client_public: bytes
    client_secret: bytes


class LinkRefusedError(Exception):
    """The peer does not accept our keys, or is no ZeroMQ peer."""


class Link:
    """Connects in the background from the start; `connected()` and `broken()` wait for either turn."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, curve: CurveKeys | None) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Without a connection there is no queue in which a request could outlive the daemon it was meant for.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MILLISECONDS)
        _apply_curve(self._socket, curve)
        self._monitor = self._socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | _REFUSED | _BROKEN)
        self._socket.connect(endpoint)

    async def connected(self) -> None:
        """Returns once the peer has shaken hands, whenever that is; raises `LinkRefusedError` if it will not."""
        while (event := await self._next_event()) != zmq.Event.HANDSHAKE_SUCCEEDED:
            if event & _REFUSED:
                raise LinkRefusedError(f"the handshake failed: {event.name}")

    async def broken(self) -> None:
        """Returns when the connection is lost."""
        while not await self._next_event() & _BROKEN:
            pass

    async def send(self, frames: Sequence[Frame]) -> None:
        """Raises `DaemonUnreachable` if the link is closed meanwhile."""
        try:
            await self._socket.send_multipart([b"", *frames])
        except asyncio.CancelledError:
            # Closing the socket cancels what waits to be sent, which is not the cancellation of our caller.
            if self._socket.closed:
                raise DaemonUnreachable("the connection broke before the request was sent") from None
            raise

    async def receive(self) -> list[bytes]:
        """The frames of the next message, without the delimiter."""
        frames = await self._socket.recv_multipart()
        return frames[1:]

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def _next_event(self) -> zmq.Event:
        return zmq.Event(parse_monitor_message(await self._monitor.recv_multipart())["event"])


def _apply_curve(socket: zmq.asyncio.Socket, curve: CurveKeys | None) -> None:
    if curve is None:
        return
    socket.curve_serverkey = curve.server_public
    socket.curve_publickey = curve.client_public
    socket.curve_secretkey = curve.client_secret
