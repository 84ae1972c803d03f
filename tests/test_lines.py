"""Direct lines to workers: real sockets and threads; here the worker is an object with two methods."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from refitd.lines import MAX_MESSAGE_BYTES, LineClosedError, Lines, encoded, open_lines
from refitd.worker.line import open_line


@dataclass
class Rank:
    """A worker of an engine."""

    rank: int
    device: Any = field(default_factory=lambda: SimpleNamespace(type="cpu"))

    def refitd_add(self, one: int, other: int) -> dict[str, Any]:
        return {"sum": one + other + self.rank, "thread": threading.current_thread().name}


async def opened(*ranks: Rank) -> Lines:
    async def ask(path: str) -> list[dict[str, Any]]:
        for rank in ranks:
            open_line(rank, path)
        return [{"open": True} for _ in ranks]

    return await open_lines(len(ranks), ask)


def message(method: str, *arguments: Any) -> bytes:
    packed = encoded(method, arguments)
    assert packed is not None
    return packed


def test_every_worker_answers_in_the_order_of_ranks_and_calls() -> None:
    """Whichever worker connected first; and the answers come from a thread of the line's own."""

    async def scenario() -> None:
        lines = await opened(Rank(10), Rank(0))
        try:
            answers = await asyncio.gather(*[lines.call(message("refitd_add", number, 1)) for number in range(50)])
        finally:
            lines.close()
        assert [[answer["sum"] for answer in both] for both in answers] == [[n + 1, n + 11] for n in range(50)]
        assert {answer["thread"] for both in answers for answer in both} == {"refitd-line"}

    asyncio.run(scenario())


def test_whoever_waits_for_a_worker_that_is_gone_is_told() -> None:
    """The call under way, the calls behind it and the later ones fail; none waits."""

    async def scenario() -> None:
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        async def ask(path: str) -> list[dict[str, Any]]:
            silent.connect(path)
            silent.send(msgspec.msgpack.encode(0))
            return [{"open": True}]

        lines = await open_lines(1, ask)
        try:
            under_way = [lines.call(message("refitd_add", 1, 1)) for _ in range(2)]
            silent.close()
            for call in under_way:
                with pytest.raises(LineClosedError):
                    await call
            with pytest.raises(LineClosedError):
                await lines.call(message("refitd_add", 1, 1))
        finally:
            lines.close()

    asyncio.run(scenario())


def test_a_call_that_nobody_awaits_any_more_does_not_shift_the_answers() -> None:
    """Each answer goes to the call it belongs to."""

    async def scenario() -> None:
        lines = await opened(Rank(0))
        try:
            lines.call(message("refitd_add", 1, 1)).cancel()
            assert [answer["sum"] for answer in await lines.call(message("refitd_add", 2, 2))] == [4]
        finally:
            lines.close()

    asyncio.run(scenario())


def test_a_worker_that_cannot_connect_leaves_no_lines() -> None:
    """As one on another host."""

    async def scenario() -> None:
        async def ask(_path: str) -> list[dict[str, Any]]:
            return [{"open": False}]

        with pytest.raises(ConnectionError):
            await open_lines(1, ask)

    asyncio.run(scenario())


def test_a_call_too_large_for_a_message_is_not_encoded() -> None:
    """The engine then calls through vLLM."""
    assert encoded("refitd_add", ["x" * MAX_MESSAGE_BYTES]) is None
