"""The worker's end of a line to the daemon: calls answered on a thread of their own, while the engine stands still.

A call through vLLM wakes eight threads one after the other, in two processes, and each waking costs about as much as
the call itself. This one wakes two.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

import msgspec
import torch

from refitd.worker.boundary import Answer

MAX_MESSAGE_BYTES = 64 << 10
# Characters, of up to four bytes.
MAX_TEXT = 8 << 10


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
    # The daemon may hang up in the middle of a call, whose answer nobody wants then.
    with line, suppress(ConnectionError):
        while message := line.recv(MAX_MESSAGE_BYTES):
            method, arguments = msgspec.msgpack.decode(message, type=tuple[str, list[Any]])
            assert method.startswith("refitd_"), "the daemon calls the extension's methods only"
            line.send(_message(getattr(worker, method)(*arguments)))


def _message(answer: Answer) -> bytes:
    """Refusals quote names that a trainer chose, and might not fit into a message: then without details."""
    message = msgspec.msgpack.encode(answer)
    if len(message) <= MAX_MESSAGE_BYTES:
        return message
    error = answer["error"]
    short = {**error, "message": error["message"][:MAX_TEXT], "details": {}}
    return msgspec.msgpack.encode({**answer, "error": short})
