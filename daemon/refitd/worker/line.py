"""The worker's end of a line to the daemon: calls answered on a thread of their own, while the engine stands still.

A call through vLLM wakes eight threads one after the other, in two processes, and each waking costs about as much as
the call itself. This one wakes two.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec
import torch

from refitd.worker.boundary import PAUSE_SECONDS, Answer, Turns

MAX_MESSAGE_BYTES = 64 << 10
# What a piece of an answer begins with.
MORE, LAST = b"\0", b"\1"
# How long a wait is watched without a pause: longer than a device takes to copy a bucket.
AWAKE_SECONDS = 0.01
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
        calls = _Calls(line)
        while message := calls.next_message():
            method, arguments = msgspec.msgpack.decode(message, type=tuple[str, list[Any]])
            assert method.startswith("refitd_"), "the daemon calls the extension's methods only"
            in_turns = getattr(worker, f"{method}_in_turns", None)
            if in_turns is not None:
                calls.begin(in_turns(*arguments))
            else:
                calls.finish()
                _send(line, _message(getattr(worker, method)(*arguments)))


class _Calls:
    """Those under way, in the order in which they came and are answered: while one waits for the device, the next one
    gets as far as it can."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._poll = select.poll()
        self._poll.register(line, select.POLLIN)
        self._under_way: deque[_Call] = deque()
        self._patient_until = 0.0

    def next_message(self) -> bytes:
        """Turns are taken in between, however many messages wait: one at least."""
        while self._under_way:
            self._take_turns()
            if self._poll.poll(0):
                break
        return self._line.recv(MAX_MESSAGE_BYTES)

    def begin(self, turns: Turns) -> None:
        self._under_way.append(_Call(turns))
        self._patient_until = time.monotonic() + AWAKE_SECONDS

    def finish(self) -> None:
        while self._under_way:
            self._take_turns()

    def _take_turns(self) -> None:
        for call in [*self._under_way]:
            call.take_turn()
            # At once: the turns of those behind it may take their time.
            self._send_answers()
        if time.monotonic() > self._patient_until:
            time.sleep(PAUSE_SECONDS)

    def _send_answers(self) -> None:
        while self._under_way and (answer := self._under_way[0].answer) is not None:
            _send(self._line, _message(answer))
            self._under_way.popleft()


class _Call:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.answer: Answer | None = None

    def take_turn(self) -> None:
        if self.answer is None:
            try:
                next(self._turns)
            except StopIteration as done:
                self.answer = done.value


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
