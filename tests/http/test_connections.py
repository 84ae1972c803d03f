"""Connections whose clients are slow, send no end, or are many: a real server, a small app in the place of vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from refitd import http, http_connection
from tests.http.test_http_door import LIMIT_BYTES, ready_gate, serving

HALF_A_HEAD = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n"
WHOLE = HALF_A_HEAD + b"content-length: 2\r\n\r\n{}"


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(http, "BODY_SECONDS", 0.2)


@asynccontextmanager
async def connected(client: httpx.AsyncClient) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection to the server of `client`."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answered(reader: asyncio.StreamReader) -> bytes:
    """The status line of one whole answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = [int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length:")]
    await reader.readexactly(length)
    return head.splitlines()[0]


@pytest.mark.parametrize(
    ("first", "then"), [(b"", b""), (b"", HALF_A_HEAD), (WHOLE, HALF_A_HEAD)], ids=["nothing", "half", "half a second"]
)
def test_a_head_that_does_not_end_in_time_ends_its_connection(first: bytes, then: bytes) -> None:
    """The first of a connection, or a later one."""

    async def ask() -> None:
        async with serving(ready_gate()) as client, connected(client) as (reader, writer):
            writer.write(first)
            if first:
                assert (await answered(reader)).endswith(b"200 OK")
            writer.write(then)
            assert await reader.read() == b""

    asyncio.run(ask())


def test_a_head_that_comes_byte_by_byte_gets_no_more_time() -> None:
    async def ask() -> None:
        async with serving(ready_gate()) as client, connected(client) as (reader, writer):
            closed = asyncio.ensure_future(reader.read())
            writer.write(HALF_A_HEAD)
            while not closed.done():
                writer.write(b"x")
                await asyncio.wait({closed}, timeout=0.01)
            assert closed.exception() is not None or closed.result() == b""

    asyncio.run(ask())


@pytest.mark.parametrize(
    "head",
    [HALF_A_HEAD + b"x: " + b"y" * (1 << 20), HALF_A_HEAD + b"x: y\r\n" * (1 << 18), b"\r\n" * (1 << 19)],
    ids=["a long line", "many lines", "empty lines"],
)
def test_a_head_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    """Long before it fills the memory."""
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 600.0)

    async def ask() -> None:
        async with serving(ready_gate()) as client, connected(client) as (reader, writer):
            writer.write(head)
            assert (await reader.readline()).endswith(b"400 Bad Request\r\n")
            assert (await client.get("/health")).status_code == 200

    asyncio.run(ask())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def ask() -> None:
        async with serving(ready_gate()) as client, connected(client) as (reader, writer):
            writer.write(HALF_A_HEAD + b"content-length: 10\r\n\r\nabc")
            assert (await answered(reader)).endswith(b"503 Service Unavailable")

    asyncio.run(ask())


def test_a_refused_body_is_read_to_its_end_so_that_its_client_reads_the_refusal() -> None:
    """Closing the connection before would have the refusal lost on the way."""

    async def ask() -> None:
        async with serving(ready_gate()) as client, connected(client) as (reader, writer):
            size = 100 * LIMIT_BYTES
            writer.write(HALF_A_HEAD + b"content-length: %d\r\n\r\n" % size)
            assert (await answered(reader)).endswith(b"413 Request Entity Too Large")
            writer.write(b"x" * size + WHOLE)
            assert (await answered(reader)).endswith(b"200 OK")

    asyncio.run(ask())


def test_an_answer_may_take_its_time() -> None:
    """What bounds a request's coming does not bound what is made of it."""

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        late = asyncio.Event()
        asyncio.get_running_loop().call_later(2 * http_connection.HEAD_SECONDS, late.set)
        await late.wait()
        await JSONResponse({})(scope, receive, send)

    async def ask() -> None:
        async with serving(ready_gate(), app=slow) as client:
            assert (await client.post("/tokenize", json={})).status_code == 200

    asyncio.run(ask())


def test_connections_beyond_the_limit_are_refused() -> None:
    """And taken again once others have gone."""

    async def ask() -> None:
        async with serving(ready_gate(), max_connections=2) as client, connected(client) as (reader, writer):
            async with connected(client) as (second, other):
                for read, write in ((reader, writer), (second, other)):
                    write.write(WHOLE)
                    assert (await answered(read)).endswith(b"200 OK")
                async with connected(client) as (third, one_more):
                    one_more.write(WHOLE)
                    assert (await third.readline()).endswith(b"503 Service Unavailable\r\n")
                    assert await third.read()
            assert (await client.get("/health")).status_code == 200

    asyncio.run(ask())
