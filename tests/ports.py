"""A TCP port for another process to listen at, which nothing else on this machine gets meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """The kernel gives a port that is bound to no one who asks for any, nor to a client's end of a connection. Nobody
    listens at it, and who asks for this very one may, by SO_REUSEADDR."""
    with socket.socket() as holding:
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holding.bind(("127.0.0.1", 0))
        yield int(holding.getsockname()[1])
