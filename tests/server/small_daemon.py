"""The daemon's server, sessions and generation on a real socket; their engine steps only when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq

from refit_protocol.messages import (
    AcknowledgeGeneration,
    AcquireWriter,
    CancelGeneration,
    CommitRefit,
    Generate,
    GetDigest,
    GetManifest,
    GetStatus,
    Goodbye,
    Heartbeat,
    Hello,
    Manifest,
    ManifestTensor,
    ModelInfo,
    ReleaseWriter,
    ResumeGeneration,
    Sampling,
    Status,
    WeightsDigest,
    WriterAcquired,
    WriterReleased,
)
from refit_protocol.states import EngineEvent
from refit_protocol.tensors import DType
from refitd.adapters import Adapters
from refitd.config import Config
from refitd.endpoint import EndpointLock, TcpEndpoint
from refitd.engine import EngineInfo
from refitd.gate import Gate
from refitd.generation import Generation
from refitd.server import Server
from refitd.sessions import Answer, Call, Sessions
from refitd.writer import Writer

_Result = TypeVar("_Result")

EPOCH = 1000
MODEL = ModelInfo(name="scripted", vocab_size=512, max_model_len=4096, dtype="float32", eos_token_ids=[2])
INFO = EngineInfo(
    model=MODEL,
    manifest=[],
    devices=["cpu"],
    vllm_version="0",
    logprobs_mode="raw",
    load_seconds=0.0,
    max_logprobs=20,
    has_tokenizer=False,
    priorities=True,
    routed_experts=False,
)


@dataclass
class Logprobs:
    logprob_token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass
class Step:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Logprobs
    finish_reason: Any = None
    stop_reason: int | str | None = None
    new_prompt_logprobs_tensors: Any = None
    prefill_stats: Any = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0


@dataclass
class ScriptedEngine:
    """Token number i of every request is `i % 500`, so a reader can tell what is missing. Steps when told to."""

    running: dict[str, tuple[int, int]] = field(default_factory=dict)
    on_step: Callable[[list[Step]], None] = lambda _steps: None
    info: EngineInfo = INFO

    def tokenize(self, text: str) -> list[int]:
        return [len(text)]

    def prepare(self, _prompt: list[int], _sampling: Sampling, *, max_tokens: int, **_: Any) -> int:
        return max_tokens

    def numbered(self, prepared: int, key: str, **_: Any) -> tuple[tuple[str, int], None]:
        return (key, prepared), None

    async def submit(self, request: tuple[str, int]) -> None:
        key, max_tokens = request
        self.running[key] = (0, max_tokens)

    async def withdraw(self, keys: list[str]) -> None:
        for key in keys:
            self.running.pop(key, None)

    def step(self, tokens: int = 1) -> None:
        """`tokens` more for every running request; those that reach their length are finished."""
        steps = []
        for key, (done, wanted) in list(self.running.items()):
            count = min(tokens, wanted - done)
            ids = [(done + index) % 500 for index in range(count)]
            rows = Logprobs(np.array(ids, np.int32)[:, None], -np.array(ids, np.float32)[:, None])
            ended = done + count == wanted
            steps.append(Step(key, ids, rows, "length" if ended else None))
            self.running[key] = (done + count, wanted)
            if ended:
                del self.running[key]
        self.on_step(steps)


class SmallDaemon:
    """Everything behind the socket that needs no vLLM; its loop runs in a thread."""

    def __init__(self, directory: Path, *, tcp: bool = False, **server_settings: Any) -> None:
        self.endpoint = "tcp://127.0.0.1:*" if tcp else f"ipc://{directory}/s"
        self.config = Config(model="scripted", endpoint=self.endpoint, server=server_settings)
        self.loop = asyncio.new_event_loop()
        self.digest_may_go_on = asyncio.Event()
        self.digests_begun = 0
        self.ended: dict[str, str] = {}
        self._local = not tcp
        self._lock = TcpEndpoint() if tcp else EndpointLock(directory / "s", self.config.server)

    def in_loop(self, work: Callable[[], _Result]) -> _Result:
        """Runs `work` between two turns of the loop."""

        async def run() -> _Result:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout=60)

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Waits, a turn of the loop at a time, until `condition` holds there."""

        async def wait() -> None:
            async with asyncio.timeout(seconds):
                while not condition():  # noqa: ASYNC110 - the condition has no event of its own
                    await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(timeout=seconds + 10)

    def step(self, tokens: int = 1) -> None:
        self.in_loop(lambda: self.engine.step(tokens))

    # --- in the loop --------------------------------------------------------------------------------------------------

    async def run(self, started: threading.Event, stop: asyncio.Event) -> None:
        config = self.config
        self.engine = ScriptedEngine()
        self.gate = Gate(config.refit.gate_wait_seconds, config.refit.max_waiting_requests)
        self.gate.step(EngineEvent.LOAD_STARTED)
        self.gate.step(EngineEvent.LOADED)
        self.sessions = Sessions(config.server, EPOCH, local=self._local)
        self.sessions.model = MODEL
        self.writer = Writer(EPOCH)
        adapters = Adapters(config, self.engine, self.gate)  # type: ignore[arg-type]
        self.generation = Generation(config, self.engine, self.gate, adapters)  # type: ignore[arg-type]
        self.server = self._build_server()
        self.sessions.on_close = [self.generation.session_closed, self._session_closed]
        self.server.bind(self.endpoint)
        self.endpoint = self.server._socket.get_string(zmq.LAST_ENDPOINT)
        self._lock.admit_group()
        expiry = asyncio.create_task(self.sessions.expire())
        started.set()
        await stop.wait()
        expiry.cancel()
        await self.sessions.close_all()
        self.server.close()

    def release(self) -> None:
        self._lock.release()

    def _build_server(self) -> Server:
        server = Server(
            self.config.server,
            self.sessions,
            instant={
                Hello: self.sessions.hello,
                Heartbeat: self.sessions.heartbeat,
                Goodbye: self.sessions.goodbye,
                GetStatus: lambda _call: Answer(self.status()),
                GetManifest: lambda _call: Answer(_MANIFEST),
                AcquireWriter: self._acquire,
                CancelGeneration: self.generation.cancel,
                ResumeGeneration: self.generation.resume,
                AcknowledgeGeneration: self.generation.acknowledge,
            },
            lengthy={
                Generate: self.generation.generate,
                GetDigest: self._digest,
                CommitRefit: self._commit,
                ReleaseWriter: self._release_writer,
            },
        )
        self.generation.send = server.send
        self.generation.can_send = server.can_send
        self.sessions.on_resumed = self.generation.session_resumed
        server.on_writable = self.generation.flush_identity
        return server

    def status(self) -> Status:
        return Status(
            daemon_version="0",
            pid=1,
            epoch=EPOCH,
            state=self.gate.state,
            model=MODEL,
            version=self.gate.version,
            digest=None,
            digest_mode="off",
            sleep_level=0,
            asleep_tags=[],
            progress=1.0,
            sessions=len(self.sessions),
            writer=None,
            running_requests=self.gate.running,
            waiting_requests=self.gate.waiting,
            restorable_version=None,
            last_refit=None,
            last_error=None,
            uptime_seconds=0.0,
            logprobs_mode="raw",
        )

    def _acquire(self, call: Call) -> Answer:
        assert isinstance(call.body, AcquireWriter)
        return Answer(WriterAcquired(epoch=self.writer.acquire(call.owner, takeover=call.body.takeover)))

    async def _release_writer(self, call: Call) -> AsyncIterator[Answer]:
        self.writer.release(call.owner)
        yield Answer(WriterReleased())

    async def _commit(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, CommitRefit)
        self.writer.check(call.owner, call.body.epoch)
        yield Answer(WeightsDigest(version=call.body.epoch, mode="full", digest="0"))

    async def _digest(self, call: Call) -> AsyncIterator[Answer]:
        """As slow as the test wants."""
        self.digests_begun += 1
        await self.digest_may_go_on.wait()
        yield Answer(WeightsDigest(version=0, mode="full", digest=f"{call.id:016x}"))

    async def _session_closed(self, session: Any, why: str) -> None:
        self.writer.release(session)
        self.ended[session.token] = why


_MANIFEST = Manifest(
    tensors=[ManifestTensor(name=f"layers.{i}.weight", dtype=DType.FLOAT32, shape=(8, 8)) for i in range(200)]
)


@contextmanager
def small_daemon(directory: Path, *, tcp: bool = False, **server_settings: Any) -> Iterator[SmallDaemon]:
    """`server_settings` are those of the configuration's `server` section."""
    directory.chmod(0o700)
    daemon = SmallDaemon(directory, tcp=tcp, **server_settings)
    started, stop = threading.Event(), asyncio.Event()
    thread = threading.Thread(target=lambda: daemon.loop.run_until_complete(daemon.run(started, stop)))
    thread.start()
    try:
        assert started.wait(30)
        yield daemon
    finally:
        daemon.loop.call_soon_threadsafe(daemon.digest_may_go_on.set)
        daemon.loop.call_soon_threadsafe(stop.set)
        thread.join()
        daemon.loop.close()
        daemon.release()
