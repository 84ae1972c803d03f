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
# What a piece of an answer begins with.
MORE, LAST = b"\0", b"\1"
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
            _send(line, _message(getattr(worker, method)(*arguments)))


def _send(line: socket.socket, message: bytes) -> None:
    """In pieces where it has to be: an answer may list every tensor of the model."""
    body_bytes = MAX_MESSAGE_BYTES - len(LAST)
    ends = range(body_bytes, len(message), body_bytes)
    for end in ends:
        line.send(MORE + message[end - body_bytes : end])
    line.send(LAST + message[len(ends) * body_bytes :])


def _message(answer: Answer) -> bytes:
    """Refusals quote names that a trainer chose: those that are too long come without details."""
    message = msgspec.msgpack.encode(answer)
    if len(message) <= MAX_MESSAGE_BYTES or "error" not in answer:
        return message
    error = answer["error"]
    short = {**error, "message": error["message"][:MAX_TEXT], "details": {}}
    return msgspec.msgpack.encode({**answer, "error": short})
