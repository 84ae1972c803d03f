"""The HTTP door by itself: a real server on a real socket, with a small app in the place of vLLM's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from refit_protocol.states import EngineEvent
from refitd import http_json
from refitd.config import HttpConfig
from refitd.gate import Gate
from refitd.http import HttpBindError, HttpServer, base_url, reserve_socket

LIMIT_BYTES = 8192


async def echo(request: Request) -> JSONResponse:
    body = await request.body()
    return JSONResponse({"path": request.url.path, "bytes": len(body)})


ECHO = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST"])])


def ready_gate() -> Gate:
    gate = Gate(wait_seconds=1.0, max_waiting=1)
    gate.step(EngineEvent.LOAD_STARTED)
    gate.step(EngineEvent.LOADED)
    return gate


@asynccontextmanager
async def serving(
    gate: Gate, *, is_open: bool = True, app: ASGIApp = ECHO, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    registry = CollectorRegistry()
    Counter("refitd_probe", "Only here.", registry=registry).inc()
    config = HttpConfig(**{"enabled": True, "max_body_bytes": LIMIT_BYTES, **settings})
    server = HttpServer(config, reserve_socket(config.host, config.port), gate, registry)
    await server.start()
    if is_open:
        server.open(app)
    try:
        async with httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1")) as client:
            yield client
    finally:
        await server.stop(grace_seconds=1.0)


# --- the socket -------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_line_that_names_it() -> None:
    with closing(reserve_socket("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            HttpBindError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"
        ) as error:
            reserve_socket("127.0.0.1", port)
        assert "\n" not in str(error.value)


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(HttpBindError, match=r"no\.such\.host\.invalid"):
        reserve_socket("no.such.host.invalid", 0)


def test_the_url_is_known_and_connections_queue_before_anybody_serves() -> None:
    with closing(reserve_socket("127.0.0.1", 0)) as reserved:
        host, port = reserved.getsockname()[:2]
        assert base_url(reserved) == f"http://{host}:{port}/v1"
        with closing(socket.create_connection((host, port))):
            pass


# --- what is let through ----------------------------------------------------------------------------------------------


def test_only_the_meant_paths_are_served() -> None:
    """vLLM's development routes stay shut even if its app should have them."""

    async def ask() -> None:
        async with serving(ready_gate()) as client:
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"):
                assert (await client.post(path, json={})).status_code == 200
            for path in ("/sleep", "/collective_rpc", "/reset_prefix_cache", "/pause", "/docs", "/openapi.json", "/v1"):
                answer = await client.post(path, json={})
                assert (answer.status_code, answer.json()["error"]["type"]) == (404, "unknown_request")

    asyncio.run(ask())


def test_a_key_is_asked_for_everywhere_but_health_and_metrics() -> None:
    async def ask() -> None:
        async with serving(ready_gate(), api_key="secret") as client:
            for path in ("/v1/models", "/tokenize", "/sleep"):
                for given in (
                    {},
                    {"authorization": "Bearer wrong"},
                    {"authorization": "secret"},
                    {"authorization": "Bearer é"},
                ):
                    headers = [(k.encode(), v.encode()) for k, v in given.items()]
                    assert (await client.get(path, headers=headers)).status_code == 401
            assert (await client.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200

    asyncio.run(ask())


def test_a_body_over_the_limit_is_refused_announced_or_not() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(LIMIT_BYTES // 1024 + 1):
            yield b"x" * 1024

    async def ask() -> None:
        async with serving(ready_gate()) as client:
            assert (await client.post("/tokenize", content=b"x" * LIMIT_BYTES)).json()["bytes"] == LIMIT_BYTES
            for content in (b"x" * (LIMIT_BYTES + 1), chunks()):
                answer = await client.post("/tokenize", content=content)
                assert answer.status_code == 413
                assert len(answer.content) < 500
            assert (await client.get("/health")).status_code == 200

    asyncio.run(ask())


def test_json_nested_a_thousand_deep_is_refused() -> None:
    async def ask() -> None:
        async with serving(ready_gate()) as client:
            for body in ("[" * 1000 + "]" * 1000, '{"a":' * 700 + "1" + "}" * 700):
                answer = await client.post("/tokenize", content=body)
                assert (answer.status_code, answer.json()["error"]["type"]) == (400, "malformed_message")
                assert len(answer.content) < 500

    asyncio.run(ask())


def test_json_of_too_many_parts_is_refused() -> None:
    """Before vLLM's parsers see it: they would keep everybody waiting, whatever the limit of bytes."""

    async def ask() -> None:
        async with serving(ready_gate(), max_body_bytes=1 << 20) as client:
            parts = [{}] * (http_json.MAX_CONTAINERS + 1)
            answer = await client.post("/tokenize", json=parts)
            assert (answer.status_code, answer.json()["error"]["type"]) == (413, "message_too_large")

    asyncio.run(ask())


# --- states -----------------------------------------------------------------------------------------------------------


def test_before_the_model_is_loaded_everything_says_so() -> None:
    async def ask() -> None:
        gate = Gate(wait_seconds=1.0, max_waiting=1)
        async with serving(gate, is_open=False) as client:
            for path in ("/health", "/v1/models", "/v1/chat/completions"):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()["error"]["type"]) == (503, "loading")
                assert answer.headers["x-should-retry"] == "true"
            assert "refitd_probe_total 1.0" in (await client.get("/metrics")).text

    asyncio.run(ask())


def test_torn_weights_serve_no_tokens_but_names_and_tokenizer() -> None:
    async def ask() -> None:
        gate = ready_gate()
        gate.step(EngineEvent.REFIT_STARTED)
        gate.step(EngineEvent.REFIT_TORN)
        async with serving(gate) as client:
            for path in ("/v1/chat/completions", "/v1/completions", "/health"):
                answer = await client.post(path, json={})
                assert (answer.status_code, answer.json()["error"]["type"]) == (503, "torn")
                assert answer.json()["error"]["fault"] == "engine"
            for path in ("/v1/models", "/tokenize", "/detokenize"):
                assert (await client.post(path, json={})).status_code == 200

    asyncio.run(ask())


def test_a_refit_under_way_is_no_reason_to_refuse() -> None:
    """Requests wait at the gate, inside."""

    async def ask() -> None:
        gate = ready_gate()
        gate.step(EngineEvent.REFIT_STARTED)
        async with serving(gate) as client:
            assert (await client.post("/v1/completions", json={})).status_code == 200
            assert (await client.get("/health")).json() == {"state": "refitting", "weights_version": 0}

    asyncio.run(ask())


def test_stopping_closes_the_socket_even_with_a_connection_open() -> None:
    async def ask() -> None:
        config = HttpConfig(enabled=True)
        reserved = reserve_socket(config.host, 0)
        address = reserved.getsockname()[:2]
        server = HttpServer(config, reserved, ready_gate(), CollectorRegistry())
        await server.start()
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc")
        await server.stop(grace_seconds=0.2)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)

    asyncio.run(ask())
