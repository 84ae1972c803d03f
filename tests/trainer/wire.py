"""A socket between client and daemon that breaks when the test says so, while the daemon goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server.small_daemon import SmallDaemon

_CHUNK_BYTES = 1 << 16


class Wire:
    """Forwards bytes both ways, on the daemon's loop."""

    def __init__(self, daemon: SmallDaemon, path: Path) -> None:
        self.endpoint = f"ipc://{path}"
        self._daemon = daemon
        self._path = path
        self._connections: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Breaks every connection, and returns when the daemon has seen it; new ones are let through."""
        # These, not as many: a client may be back before anybody looks.
        cut: set[asyncio.Task[None]] = set()

        def cancel() -> None:
            cut.update(self._connections)
            for task in cut:
                task.cancel()

        self._daemon.in_loop(cancel)
        self._daemon.until(lambda: all(task.done() for task in cut))

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self._path)

    async def close(self) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        far_reader, far_writer = await asyncio.open_unix_connection(self._daemon.endpoint.removeprefix("ipc://"))
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_forward(reader, far_writer))
                both.create_task(_forward(far_reader, writer))
        except asyncio.CancelledError:
            # The end of a connection that was cut; its streams' owner must not hear of it.
            pass
        finally:
            writer.close()
            far_writer.close()
            self._connections.discard(task)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextmanager
def wire_to(daemon: SmallDaemon, path: Path) -> Iterator[Wire]:
    wire = Wire(daemon, path)
    asyncio.run_coroutine_threadsafe(wire.open(), daemon.loop).result(timeout=30)
    try:
        yield wire
    finally:
        asyncio.run_coroutine_threadsafe(wire.close(), daemon.loop).result(timeout=30)
