"""Sockets to the workers themselves, beside vLLM's own calls: see `worker/line.py` for why.

Calls on one line are answered in order. Nothing here knows when a worker may be called directly: the engine does.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 64 << 10
# What a piece of an answer begins with, if it is not the last.
MORE = b"\0"
# A worker connects before it answers the call that asks it to.
ACCEPT_SECONDS = 5.0

Answers = list[dict[str, Any]]
_Settle = Callable[[dict[str, Any] | Exception], None]

# Made once: to make a decoder for the type takes three times as long as to decode.
_answer_decoder = msgspec.msgpack.Decoder(dict[str, Any])


class LineClosedError(Exception):
    """The worker has hung up, or says what is no answer: nothing is known of the calls under way."""


async def open_lines(workers: int, ask: Callable[[str], Awaitable[Answers]]) -> Lines:
    """`ask` has every worker connect to a path; raises `OSError` or `TimeoutError` where one cannot, or is another's.

    The socket's name exists only meanwhile, in a directory that nobody else can enter.
    """
    with tempfile.TemporaryDirectory(prefix="refitd-") as directory, ExitStack() as lines:
        path = str(Path(directory) / "line")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(workers)
            listener.setblocking(False)
            if not all(answer["open"] for answer in await ask(path)):
                raise ConnectionError("a worker could not connect")
            async with asyncio.timeout(ACCEPT_SECONDS):
                accepted = dict([await _accepted(listener, lines) for _ in range(workers)])
        if len(accepted) < workers:
            raise ConnectionError(f"{workers} lines for the ranks {sorted(accepted)} alone")
        lines.pop_all()
    return Lines([line for _, line in sorted(accepted.items())])


async def _accepted(listener: socket.socket, lines: ExitStack) -> tuple[int, socket.socket]:
    loop = asyncio.get_running_loop()
    line, _ = await loop.sock_accept(listener)
    lines.enter_context(line)
    line.setblocking(False)
    try:
        return msgspec.msgpack.decode(await loop.sock_recv(line, MAX_MESSAGE_BYTES), type=int), line
    except msgspec.DecodeError as error:
        raise ConnectionError(f"not a worker: {error}") from None


class Lines:
    """One for each worker, by rank; belongs to the event loop's thread."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._lines = [_Line(line) for line in sockets]

    def call(self, message: bytes) -> asyncio.Future[Answers]:
        """One answer per worker, rank order; fails with `LineClosedError`."""
        call = _Call(len(self._lines))
        for rank, line in enumerate(self._lines):
            line.call(message, partial(call.settle, rank))
        return call.answered

    def close(self) -> None:
        for line in self._lines:
            line.close()


class _Call:
    """To all workers. `answered` is there in the very turn of the loop in which the last answer comes, which is one
    sooner than `asyncio.gather` has it.
    """

    def __init__(self, workers: int) -> None:
        self.answered: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self._answers: Answers = [{}] * workers
        self._missing = workers

    def settle(self, rank: int, outcome: dict[str, Any] | Exception) -> None:
        """Once for each worker. Whoever waited may have been told of another's end, or be gone."""
        if self.answered.done():
            return
        if isinstance(outcome, Exception):
            self.answered.set_exception(outcome)
            return
        self._answers[rank] = outcome
        self._missing -= 1
        if not self._missing:
            self.answered.set_result(self._answers)


class _Line:
    """`_unsent`: calls for which a worker that is busy with those before has no room yet; `_pieces`: of an answer that
    is still coming."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._waiting: deque[_Settle] = deque()
        self._unsent: deque[bytes] = deque()
        self._pieces: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(line.fileno(), self._read)

    def call(self, message: bytes, settle: _Settle) -> None:
        """`settle` gets the answer, or a `LineClosedError`."""
        self._waiting.append(settle)
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._send()

    def close(self, why: str = "the worker's process is gone") -> None:
        if self._line.fileno() >= 0:
            self._loop.remove_reader(self._line.fileno())
            self._loop.remove_writer(self._line.fileno())
            self._line.close()
        self._unsent.clear()
        while self._waiting:
            self._waiting.popleft()(LineClosedError(why))

    def _send(self) -> None:
        try:
            while self._unsent:
                self._line.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._line.fileno(), self._send_rest)
        except OSError as error:
            self.close(str(error))

    def _send_rest(self) -> None:
        self._loop.remove_writer(self._line.fileno())
        self._send()

    def _read(self) -> None:
        try:
            message = self._line.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.close()
            return
        self._pieces.append(message[len(MORE) :])
        if message.startswith(MORE):
            return
        whole, self._pieces = b"".join(self._pieces), []
        try:
            answer = _answer_decoder.decode(whole)
            settle = self._waiting.popleft()
        except (msgspec.DecodeError, IndexError) as error:
            self.close(f"the worker said what is no answer: {error}")
            return
        settle(answer)


def encoded(method: str, arguments: Sequence[Any]) -> bytes | None:
    """The message of a call, None if it is too large for a line."""
    message = msgspec.msgpack.encode((method, arguments))
    return message if len(message) <= MAX_MESSAGE_BYTES else None
