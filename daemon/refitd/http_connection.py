"""One HTTP connection, bounded where uvicorn does not bound it: how long the head of a request may be, and take.

Without, a client that sends half a head holds its connection for ever, and one that never ends it fills the memory.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 30.0
MAX_HEAD_BYTES = 64 << 10
# What still comes of a body that was refused is read, so that its client sees the refusal and no broken connection.
MAX_REFUSED_BYTES = 64 << 20


class BoundedConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # uvicorn's choice between two parsers
    """`cycle`, which is uvicorn's, is the request whose head came last; None before the first one."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._waiting: asyncio.TimerHandle | None = None
        self._idle_bytes = 0
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
            self._idle_bytes = 0
            return
        self._idle_bytes += len(data)
        if self._idle_bytes > self._max_idle_bytes and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")
        elif self._waiting is None:
            self._wait()

    @property
    def _max_idle_bytes(self) -> int:
        """What may come while no request is being answered."""
        answered_early = self.cycle is not None and self.cycle.more_body
        return MAX_REFUSED_BYTES if answered_early else MAX_HEAD_BYTES

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
