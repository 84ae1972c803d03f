"""The HTTP door: a socket held from before the model loads, a server on the daemon's loop, and what it lets through.

vLLM's own app answers the requests; what must not reach it - unknown paths, wrong keys, bodies that are too much for
its parsers, requests that no weights can serve - is answered here.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Counter, generate_latest
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.adapters import AdapterUses
from refitd.config import HttpConfig
from refitd.engine import Adapter, Engine, EngineInfo, StartupError
from refitd.gate import Gate
from refitd.http_body import BodyRoom, BodyShare, read_body
from refitd.http_connection import BoundedConnection
from refitd.http_errors import error_response
from refitd.http_json import check_json

if TYPE_CHECKING:
    from refitd.compat_openai import OpenAIEndpoint

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
BODY_SECONDS = 60.0

# Everything else of vLLM's app, its development routes above all, stays shut. True: needs weights that can be served.
PATHS: Mapping[str, bool] = {
    "/v1/chat/completions": True,
    "/v1/completions": True,
    "/v1/models": False,
    "/tokenize": False,
    "/detokenize": False,
    "/version": False,
}
OPEN_PATHS = frozenset({"/health", "/metrics"})

# A longer look at a body would keep everybody else waiting.
LOOKED_AT_HERE_BYTES = 1 << 20

log = structlog.get_logger()


class HttpBindError(Exception):
    """The endpoint's address cannot be bound; one line that says which and why."""


def reserve_socket(host: str, port: int) -> socket.socket:
    """Binds and listens; port 0 takes a free one. The socket is never let go in between. Raises `HttpBindError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        reserved = socket.socket(family, kind, protocol)
    except OSError as error:
        raise HttpBindError(f"http.host {host!r}: {error.strerror or error}") from None
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
        reserved.listen(BACKLOG)
    except OSError as error:
        reserved.close()
        raise HttpBindError(f"http: cannot listen on {host}:{port}: {error.strerror}") from None
    reserved.setblocking(False)
    return reserved


def base_url(reserved: socket.socket) -> str:
    """What an OpenAI client takes as its base URL; a wildcard address is named by this host's name."""
    host, port = reserved.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


class HttpServer:
    """Serves the reserved socket from `start` to `stop`; requests that need the model are refused until `open`."""

    def __init__(
        self,
        config: HttpConfig,
        reserved: socket.socket,
        gate: Gate,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._config = config
        self._socket = reserved
        self._endpoint: OpenAIEndpoint | None = None
        self._prefixes = Counter(
            "refitd_http_prefixes", "Prompts that asked for exact earlier tokens.", ["outcome"], registry=registry
        )
        self._gate = gate
        self._door = Door(config, gate, registry)
        self._server = _EmbeddedServer(
            uvicorn.Config(
                self._door,
                http=BoundedConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                # uvicorn refuses the connection that makes the limit full.
                limit_concurrency=config.max_connections + 1,
            )
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        return base_url(self._socket)

    async def start(self) -> asyncio.Task[None]:
        """Answers from now on, if only that the model is still loading; returns what runs until `stop`."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")
        await self._server.is_up.wait()
        log.info("http", url=self.base_url)
        return self._task

    async def serve_model(self, engine: Engine, info: EngineInfo, adapters: AdapterUses) -> None:
        """The model is loaded: vLLM's app answers. Raises `StartupError` for a parser or template that vLLM refuses."""
        from refitd.compat_openai import OpenAIEndpoint

        endpoint = OpenAIEndpoint(engine.llm, info.model, self._config, self._gate, info.logprobs_mode, adapters)
        try:
            await endpoint.build()
        except (KeyError, TypeError, ValueError) as error:
            raise StartupError(f"http: vLLM's server app did not start: {error}") from error
        endpoint.on_prefix = lambda outcome: self._prefixes.labels(outcome).inc()
        self._endpoint = endpoint
        self.open(endpoint.app)

    def serve_adapters(self, adapters: Iterable[Adapter]) -> None:
        """Each is a model of its own, by name; to be told again after every change."""
        if self._endpoint is not None:
            self._endpoint.serve_adapters(adapters)

    def open(self, app: ASGIApp) -> None:
        self._door.app = app

    async def abort_all(self, error: ErrorCode) -> None:
        """Ends every running request: with the tokens it has, or with `error`."""
        if self._endpoint is not None:
            await self._endpoint.abort_all(error)

    async def stop(self, grace_seconds: float) -> None:
        """Running answers get `grace_seconds`, then their connections are closed. The socket is closed in any case."""
        self._server.should_exit = True
        if self._task is not None:
            _, running = await asyncio.wait({self._task}, timeout=grace_seconds)
            if running:
                self._server.force_exit = True
                await self._task
        self._socket.close()


class _EmbeddedServer(uvicorn.Server):
    """Signals are the daemon's own business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class Door:
    """The ASGI app in front of vLLM's."""

    def __init__(self, config: HttpConfig, gate: Gate, registry: CollectorRegistry) -> None:
        self._config = config
        self._gate = gate
        self._registry = registry
        self._room = BodyRoom(config.max_total_body_bytes)
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        # Until the answer has ended: vLLM's app keeps the body, and what it read there, as long.
        with BodyShare(self._room) as share:
            try:
                answer: ASGIApp = await self._answer(scope, receive, share)
            except ProtocolError as error:
                answer = error_response(error)
            await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, share: BodyShare) -> ASGIApp:
        path = scope["path"]
        if path == "/health":
            return self._health()
        if path == "/metrics":
            return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
        self._check_key(Headers(scope=scope))
        app = self._app_for(path)
        body = await self._body(scope, receive, share)
        if len(body) <= LOOKED_AT_HERE_BYTES:
            check_json(body)
        else:
            await asyncio.to_thread(check_json, body)
        return _WithBody(app, body)

    async def _body(self, scope: Scope, receive: Receive, share: BodyShare) -> bytes:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await read_body(scope, receive, self._config.max_body_bytes, share)
        except TimeoutError:
            raise ProtocolError(
                ErrorCode.DEADLINE_EXCEEDED, f"the body did not come within {BODY_SECONDS:g} s"
            ) from None

    def _health(self) -> Response:
        refusal = self._gate.refusal()
        if refusal is not None:
            return error_response(refusal)
        return JSONResponse({"state": self._gate.state.value, "weights_version": self._gate.version})

    def _check_key(self, headers: Headers) -> None:
        key = self._config.api_key
        if key is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.encode(), key.encode()):
            raise ProtocolError(
                ErrorCode.PEER_NOT_ALLOWED, "the Authorization header must carry the daemon's http.api_key"
            )

    def _app_for(self, path: str) -> ASGIApp:
        needs_weights = PATHS.get(path)
        if needs_weights is None:
            raise ProtocolError(
                ErrorCode.UNKNOWN_REQUEST, f"{path} is not served: {', '.join(sorted({*PATHS, *OPEN_PATHS}))} are"
            )
        refusal = self._gate.refusal()
        if refusal is not None and (needs_weights or self.app is None):
            raise refusal
        if self.app is None:
            raise ProtocolError(ErrorCode.LOADING, "the model is still loading")
        return self.app


class _WithBody:
    """`app` with a request body that was read already; what the client does after it still comes through."""

    def __init__(self, app: ASGIApp, body: bytes) -> None:
        self._app = app
        self._body: bytes | None = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def replay() -> Message:
            if self._body is None:
                return await receive()
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)
