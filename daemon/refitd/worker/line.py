"""The worker's end of a line to the daemon: calls answered on a thread of their own, while the engine stands still.

A call through vLLM wakes eight threads one after the other, in two processes, and each waking costs about as much as
the call itself. This one wakes two.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec
import torch

MAX_MESSAGE_BYTES = 64 << 10


def open_line(worker: Any, path: str) -> None:
    """Connects to the daemon's socket, says which rank this is, and serves calls until the daemon hangs up."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(path)
        line.send(msgspec.msgpack.encode(worker.rank))
    except BaseException:
        line.close()
        raise
    threading.Thread(target=_serve, args=(worker, line), name="refitd-line", daemon=True).start()


def _serve(worker: Any, line: socket.socket) -> None:
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)
    with line:
        while message := line.recv(MAX_MESSAGE_BYTES):
            method, arguments = msgspec.msgpack.decode(message, type=tuple[str, list[Any]])
            assert method.startswith("refitd_"), "the daemon calls the extension's methods only"
            line.send(msgspec.msgpack.encode(getattr(worker, method)(*arguments)))
