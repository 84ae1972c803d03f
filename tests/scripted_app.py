"""The whole daemon on the test's own loop, except that vLLM is a script: it answers as the test says, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pytest
from prometheus_client import CollectorRegistry

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AcquireWriter,
    Command,
    LoadModel,
    ModelLoaded,
    OpenSource,
    Reply,
    SourceOpened,
    WriterAcquired,
)
from refit_protocol.states import EngineEvent
from refitd import app as app_module
from refitd.app import App, ExitCode
from refitd.config import Config
from refitd.endpoint import TcpEndpoint
from refitd.engine import Engine, EngineInfo
from refitd.metrics import RefitdMetrics
from refitd.notify import Notifier
from refitd.sessions import Answer, Call, Session, SessionState
from tests.server.small_daemon import INFO

DIGEST = {"digest": "0", "digest_parts": {}}
WRITTEN = {
    "bytes": 4,
    "tensors": 1,
    "path": "plan",
    "loader_tensors": [],
    "milliseconds": {"validate": 0.0, "copy": 0.0, "attest": 0.0},
    **DIGEST,
}
OPENED = {"path": "plan", "planned": 1, "loader_tensors": [], "bytes": 4, "release": False}
ANSWERS: Mapping[str, dict[str, Any]] = {
    "refitd_commit": WRITTEN,
    "refitd_finish": WRITTEN,
    "refitd_open_source": OPENED,
    "refitd_begin": OPENED,
    "refitd_apply_bucket": {"bytes": 4},
    "refitd_validate": OPENED,
    "refitd_prepare": {"waiting": False},
    "refitd_stand_by": {"waiting": True},
    "refitd_give_way": {"wrote": False},
    "refitd_abort": {"wrote": False},
    "refitd_cache_is_finite": {"finite": False},
    "refitd_digest": DIGEST,
    "refitd_restore": DIGEST,
    "refitd_load_adapter": {"unused": []},
}

_Reply = TypeVar("_Reply", bound=Reply)


def worker_refusal(code: ErrorCode, *, wrote: bool = False) -> dict[str, Any]:
    """What a worker answers instead."""
    return {"error": {"code": code.value, "message": "refused by the test", "details": {}}, "wrote": wrote}


@dataclass
class Held:
    """A call that has begun and is not answered before the test says so."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedLLM:
    """What `refitd.engine` asks of vLLM, for an engine of one worker, or of as many as a failure is a list of answers.
    Everything is answered at once unless held. `asked` are the workers' calls with their arguments."""

    has_replicas = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.held: dict[str, Held] = {}
        self.failures: dict[str, Exception | dict[str, Any] | list[dict[str, Any]]] = {}
        self.requests_added = 0
        self.nan_seen = False
        self.on_nan: Callable[[], None] = lambda: None

    def note_nan(self) -> None:
        self.nan_seen = True
        self.on_nan()

    def hold(self, call: str) -> Held:
        """Until the test lets go, or for ever: as an engine that hangs."""
        return self.held.setdefault(call, Held())

    def release(self) -> None:
        """Whatever is held is answered, now and later."""
        for held in self.held.values():
            held.may_end.set()

    async def call_workers(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.asked.append((method, args))
        await self._called(method)
        failure = self.failures.get(method)
        if isinstance(failure, list):
            return failure
        return [failure if isinstance(failure, dict) else {"ok": True, **ANSWERS.get(method, {})}]

    async def is_sleeping(self) -> bool:
        await self._called("is_sleeping")
        return False

    async def sleep(self, level: int) -> None:
        await self._called(f"sleep {level}")

    async def wake_up(self, **_: Any) -> None:
        await self._called("wake_up")

    async def freeze(self, **_: Any) -> None:
        await self._called("freeze")

    async def thaw(self) -> None:
        await self._called("thaw")

    async def withdraw(self, _request_ids: list[str]) -> None:
        await self._called("withdraw")

    def shutdown(self, **_: Any) -> None:
        self.calls.append("shutdown")

    async def _called(self, call: str) -> None:
        self.calls.append(call)
        held = self.held.get(call)
        if held is not None:
            held.begun.set()
            await held.may_end.wait()
        failure = self.failures.get(call)
        if isinstance(failure, Exception):
            raise failure


class ScriptedEngine(Engine):
    """The daemon's own, around a scripted vLLM."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.script = ScriptedLLM()

    async def load(self) -> EngineInfo:
        self._llm = self.script  # type: ignore[assignment]
        self.script.on_nan = lambda: self.on_nan()
        self.info = INFO
        return self.info


class ScriptedApp:
    """A daemon, and sessions that ask it without a socket in between."""

    def __init__(self, app: App) -> None:
        assert isinstance(app.engine, ScriptedEngine)
        self.app = app
        self.llm = app.engine.script
        self._sessions = 0
        self._requests = 0

    async def load(self) -> None:
        """What the daemon's start does, without a server app or figures."""
        self.app.gate.step(EngineEvent.LOAD_STARTED)
        await self.app.engine.load()
        await self.app.commit.begin_service()
        self.app.gate.step(EngineEvent.LOADED)

    def stop(self) -> None:
        """As SIGTERM does."""
        self.app._on_signal("SIGTERM")

    def session(self) -> Session:
        self._sessions += 1
        return Session(
            str(self._sessions), "test", self._sessions, 9.0, b"%d" % self._sessions, state=SessionState.OPEN
        )

    async def ask(self, session: Session, body: Command, expected: type[_Reply]) -> _Reply:
        """The one reply to a command; raises what the command is refused with."""
        self._requests += 1
        call = Call(session.identity, self._requests, body, [], session)
        handler: Callable[[Call], AsyncIterator[Answer]] = self.app.server._lengthy[type(body)]  # type: ignore[assignment]
        (reply,) = [answer.body async for answer in handler(call)]
        assert isinstance(reply, expected)
        return reply

    async def writer(self) -> tuple[Session, int]:
        session = self.session()
        return session, (await self.ask(session, AcquireWriter(), WriterAcquired)).epoch

    async def open(self, session: Session, epoch: int, kind: Any = "inplace") -> int:
        """An empty source: to a scripted worker all are the same."""
        command = OpenSource(epoch=epoch, kind=kind, segments=[], tensors=[])
        return (await self.ask(session, command, SourceOpened)).source


def build_app(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> ScriptedApp:
    """Has to be called on the loop; `settings` are the configuration's."""
    monkeypatch.setattr(app_module, "Engine", ScriptedEngine)
    monkeypatch.setattr(app_module, "RefitdMetrics", lambda: RefitdMetrics(CollectorRegistry()))
    config = Config(model="scripted", endpoint=f"ipc://{directory}/s", runtime_directory=directory, **settings)
    return ScriptedApp(App(config, TcpEndpoint(), None, Notifier(environment), lambda: config))


@asynccontextmanager
async def loaded_app(directory: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[ScriptedApp]:
    """A daemon that serves, without a socket or signals."""
    scripted = build_app(directory, monkeypatch, **settings)
    try:
        await scripted.load()
        yield scripted
    finally:
        scripted.app.engine.stop()
        scripted.app.server.close()


@asynccontextmanager
async def running_app(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> AsyncIterator[tuple[ScriptedApp, asyncio.Task[ExitCode]]]:
    """A daemon from its start to its end, loaded, and what it ends with; told to stop at once when it is left."""
    scripted = build_app(directory, monkeypatch, environment, defer_load=True, **settings)
    # The server app and the records of an engine's processes need a real one.
    scripted.app.lifecycle.on_loaded = []
    run = asyncio.create_task(scripted.app.run())
    try:
        await scripted.ask(scripted.session(), LoadModel(), ModelLoaded)
        yield scripted, run
    finally:
        scripted.llm.release()
        for _ in range(2):
            scripted.stop()
        await run
