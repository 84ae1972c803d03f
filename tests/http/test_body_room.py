"""The bodies of all requests together: what has no room is refused before it is read, and all room comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from refitd import http
from tests.http.test_connections import answered, connected
from tests.http.test_http_door import ECHO, LIMIT_BYTES, ready_gate, serving

WHOLE = b"x" * LIMIT_BYTES
# The daemon says 100 when it begins to read: the body has its room then.
HEAD = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
ANNOUNCED = HEAD + b"content-length: %d\r\n\r\n" % LIMIT_BYTES
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def chunk(size_bytes: int) -> bytes:
    return b"%x\r\n%s\r\n" % (size_bytes, b"x" * size_bytes)


async def is_read(connection: Connection, head: bytes) -> None:
    """Returns once the daemon reads the body of a request with this head."""
    reader, writer = connection
    writer.write(head)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")


async def has_room(client: httpx.AsyncClient) -> bool:
    """Whether the daemon takes one body of the largest size."""
    status = (await client.post("/tokenize", content=WHOLE)).status_code
    assert status in (200, 503)
    return status == 200


def test_a_body_without_room_is_refused_before_it_is_read() -> None:
    """With what its client needs to know; the one that has the room is not harmed, and makes room once answered."""

    async def ask() -> None:
        async with (
            serving(ready_gate(), max_total_body_bytes=LIMIT_BYTES) as client,
            connected(client) as first,
            connected(client) as second,
        ):
            await is_read(first, ANNOUNCED)
            second[1].write(ANNOUNCED)
            head = (await second[0].readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 503")
            assert b"retry-after: 1\r\n" in head
            assert b"x-should-retry: true\r\n" in head
            refused = (await client.post("/tokenize", content=b"{}")).json()["error"]
            assert (refused["type"], refused["fault"], refused["retryable"]) == ("too_many_requests", "daemon", True)
            assert "http.max_total_body_bytes" in refused["message"]
            assert (await client.get("/v1/models")).status_code == 200
            first[1].write(WHOLE)
            assert (await answered(first[0])).endswith(b"200 OK")
            assert await has_room(client)

    asyncio.run(ask())


def test_a_chunked_body_is_refused_as_soon_as_it_is_too_much() -> None:
    """Its size is not known before, so its room grows with it."""

    async def ask() -> None:
        async with (
            serving(ready_gate(), max_total_body_bytes=LIMIT_BYTES + 1000) as client,
            connected(client) as first,
            connected(client) as second,
        ):
            await is_read(first, ANNOUNCED)
            await is_read(second, CHUNKED)
            second[1].write(chunk(1001))
            assert (await answered(second[0])).endswith(b"503 Service Unavailable")
            second[1].write(chunk(1000) + b"0\r\n\r\n")
            await is_read(second, CHUNKED)
            second[1].write(chunk(1000) + b"0\r\n\r\n")
            assert (await answered(second[0])).endswith(b"200 OK")

    asyncio.run(ask())


def test_a_body_has_its_room_until_it_is_answered() -> None:
    """What vLLM's app has read of it lies in memory as long."""

    async def ask() -> None:
        is_answering, answer = asyncio.Event(), asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            size_bytes = len(await Request(scope, receive).body())
            if not is_answering.is_set():
                is_answering.set()
                await answer.wait()
            await JSONResponse({"bytes": size_bytes})(scope, receive, send)

        async with serving(ready_gate(), app=slow, max_total_body_bytes=LIMIT_BYTES) as client:
            first = asyncio.create_task(client.post("/tokenize", content=WHOLE))
            await is_answering.wait()
            assert not await has_room(client)
            answer.set()
            assert (await first).json() == {"bytes": LIMIT_BYTES}
            assert await has_room(client)

    asyncio.run(ask())


# --- room comes back --------------------------------------------------------------------------------------------------


async def client_leaves(connection: Connection, head: bytes) -> None:
    await is_read(connection, head)
    connection[1].write(chunk(1000))
    connection[1].close()


async def body_stops(connection: Connection, head: bytes) -> None:
    await is_read(connection, head)
    connection[1].write(chunk(1000))
    assert (await answered(connection[0])).endswith(b"503 Service Unavailable")


async def no_json(connection: Connection, head: bytes) -> None:
    await is_read(connection, head)
    zeros = b"\0" * LIMIT_BYTES
    connection[1].write(zeros if head is ANNOUNCED else b"%x\r\n%s\r\n0\r\n\r\n" % (LIMIT_BYTES, zeros))
    assert (await answered(connection[0])).endswith(b"400 Bad Request")


async def app_fails(connection: Connection, head: bytes) -> None:
    await is_read(connection, head)
    connection[1].write(b"z" * LIMIT_BYTES if head is ANNOUNCED else b"5\r\nzzzzz\r\n0\r\n\r\n")
    assert (await connection[0].readline()).endswith(b"500 Internal Server Error\r\n")


async def failing(scope: Scope, receive: Receive, send: Send) -> None:
    """Fails over what begins with z."""
    request = Request(scope, receive)
    if (await request.body()).startswith(b"z"):
        raise RuntimeError("a bug of the app")
    await JSONResponse({})(scope, receive, send)


Ending = Callable[[Connection, bytes], Awaitable[None]]


@pytest.mark.parametrize("head", [ANNOUNCED, CHUNKED], ids=["announced", "chunked"])
@pytest.mark.parametrize(
    ("ending", "app"),
    [(client_leaves, ECHO), (body_stops, ECHO), (no_json, ECHO), (app_fails, failing)],
)
def test_room_comes_back_however_a_request_ends(
    monkeypatch: pytest.MonkeyPatch, head: bytes, ending: Ending, app: ASGIApp
) -> None:
    if ending is body_stops:
        monkeypatch.setattr(http, "BODY_SECONDS", 0.2)

    async def ask() -> None:
        async with (
            serving(ready_gate(), app=app, max_total_body_bytes=LIMIT_BYTES) as client,
            connected(client) as connection,
            asyncio.timeout(30),
        ):
            await ending(connection, head)
            # That a client has left is noticed later.
            while not await has_room(client):
                pass

    asyncio.run(ask())


def test_room_comes_back_from_a_chunked_body_that_turns_out_too_large() -> None:
    async def ask() -> None:
        async with (
            serving(ready_gate(), max_total_body_bytes=LIMIT_BYTES) as client,
            connected(client) as connection,
            asyncio.timeout(30),
        ):
            await is_read(connection, CHUNKED)
            connection[1].write(chunk(1000))
            while await has_room(client):
                pass
            connection[1].write(chunk(LIMIT_BYTES))
            assert (await answered(connection[0])).endswith(b"413 Request Entity Too Large")
            assert await has_room(client)

    asyncio.run(ask())
