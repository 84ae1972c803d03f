"""The engine's life as requests see it: load, sleep, wake, cache, status."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import structlog

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    GetLoggerMetrics,
    GetManifest,
    GetStatus,
    LoadModel,
    LoadPhase,
    LoggerMetrics,
    Manifest,
    ModelLoaded,
    PrefixCacheReset,
    RefitReport,
    RefitSummary,
    ResetPrefixCache,
    SleepTag,
    Status,
)
from refit_protocol.states import ASLEEP, EngineEvent, EngineState
from refitd import __version__
from refitd.adapters import Adapters
from refitd.commit import Commit
from refitd.config import ConfigError
from refitd.engine import Engine, EngineInfo, StartupError
from refitd.gate import Gate
from refitd.refit import Refit
from refitd.sampler import LoggerMetricsSampler
from refitd.sessions import Answer, Call, Sessions

log = structlog.get_logger()


class Lifecycle:
    """Answers what the engine is doing and changes it. Belongs to the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        commit: Commit,
        refit: Refit,
        sessions: Sessions,
        adapters: Adapters,
        epoch: int,
    ) -> None:
        self._adapters = adapters
        self._engine = engine
        self._gate = gate
        self._commit = commit
        self._refit = refit
        self._sessions = sessions
        self._epoch = epoch
        self._started = time.monotonic()
        self._load: asyncio.Task[EngineInfo] | None = None
        self.sampler: LoggerMetricsSampler | None = None
        self.http_url: str | None = None
        self.generated_tokens: Callable[[], int] = lambda: 0
        self.on_loaded: list[Callable[[EngineInfo], Awaitable[None]]] = []
        self.read_progress: Callable[[], float] = lambda: 0.0
        self.room_problem: Callable[[], str | None] = lambda: None
        self.on_failed: Callable[[Exception], None] = lambda _error: None

    # --- load ---------------------------------------------------------------------------------------------------------

    async def load(self) -> EngineInfo:
        """Loads once, however often it is asked for; raises `StartupError`."""
        if self._load is None:
            self._gate.step(EngineEvent.LOAD_STARTED)
            self._load = asyncio.create_task(self._load_model(), name="load")
        return await asyncio.shield(self._load)

    async def load_model(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, LoadModel)
        try:
            info = await self.load()
        except (StartupError, ConfigError) as error:
            raise ProtocolError(ErrorCode.ENGINE_ERROR, f"{error}; the daemon ends") from error
        yield Answer(ModelLoaded(model=info.model, load_seconds=info.load_seconds))

    async def _load_model(self) -> EngineInfo:
        try:
            return await self._begin_service()
        # The boundary of a task: half an engine cannot be tried again in the same process, whatever it failed of.
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        """Whoever asks for the status until the daemon ends learns why."""
        self._gate.failed(ProtocolError(ErrorCode.ENGINE_ERROR, str(error) or type(error).__name__))
        if self._gate.state is not EngineState.DEAD:
            self._gate.step(EngineEvent.DIED)
        self.on_failed(error)

    async def _begin_service(self) -> EngineInfo:
        if problem := self.room_problem():
            raise StartupError(problem)
        info = await self._engine.load()
        self._sessions.model = info.model
        try:
            await self._commit.begin_service()
            for hook in self.on_loaded:
                await hook(info)
        except ProtocolError as error:
            raise StartupError(f"the engine cannot serve: {error.message}") from error
        self._gate.step(EngineEvent.LOADED)
        log.info("model loaded", model=info.model.name, load_seconds=round(info.load_seconds, 1), devices=info.devices)
        return info

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """How much of the weights is loaded, 0 to 1."""
        if self._gate.state is EngineState.LOADING and self._engine.info is None:
            return self.read_progress()
        return 0.0 if self._engine.info is None else 1.0

    @property
    def load_phase(self) -> LoadPhase | None:
        """None unless a model is being loaded."""
        if self._gate.state is not EngineState.LOADING:
            return None
        if self.progress == 0.0:
            return "starting the engine"
        return "loading weights" if self.progress < 1.0 else "warming up"

    def status(self, call: Call) -> Answer:
        assert isinstance(call.body, GetStatus)
        return Answer(self.read_status())

    def read_status(self) -> Status:
        gate, info, writer = self._gate, self._engine.info, self._refit.writer.session
        level, tags = ASLEEP[gate.sleep]
        return Status(
            daemon_version=__version__,
            pid=os.getpid(),
            epoch=self._epoch,
            state=gate.state,
            model=None if info is None else info.model,
            version=gate.version,
            digest=self._commit.digest,
            digest_mode=self._commit.digest_mode,
            sleep_level=level,
            asleep_tags=msgspec.convert(tags, list[SleepTag]),
            progress=self.progress,
            load_phase=self.load_phase,
            sessions=len(self._sessions),
            writer=None if writer is None else writer.client,
            running_requests=gate.running,
            waiting_requests=gate.waiting,
            generated_tokens=self.generated_tokens(),
            restorable_version=self._commit.restorable_version,
            last_refit=self._commit.reports[0] if self._commit.reports else None,
            last_error=gate.last_error,
            uptime_seconds=time.monotonic() - self._started,
            logprobs_mode="" if info is None else info.logprobs_mode,
            http_url=self.http_url,
            vllm_version=None if info is None else info.vllm_version,
            devices=[] if info is None else info.devices,
            adapters=sorted(self._adapters.loaded),
            recent_refits=[_summary(report) for report in self._commit.reports],
            open_refit=self._refit.open_phase,
            stands_by=self._refit.stands_by,
        )

    def manifest(self, call: Call) -> Answer:
        assert isinstance(call.body, GetManifest)
        if self._engine.info is None:
            raise ProtocolError(ErrorCode.LOADING, "the model is not loaded yet: its manifest is not known")
        return Answer(Manifest(tensors=self._engine.info.manifest))

    def logger_metrics(self, call: Call) -> Answer:
        assert isinstance(call.body, GetLoggerMetrics)
        if self.sampler is None:
            raise ProtocolError(ErrorCode.LOADING, "the model is not loaded yet: there are no engine figures")
        samples = self.sampler.get()
        if call.body.clear:
            self.sampler.clear()
        return Answer(LoggerMetrics(interval_seconds=self.sampler.interval_seconds, samples=samples))

    async def reset_prefix_cache(self, call: Call) -> AsyncIterator[Answer]:
        """A reset that vLLM does not make is an error, not a success."""
        assert isinstance(call.body, ResetPrefixCache)
        await self._gate.admit()
        await self._engine.reset_prefix_cache(preempt_running=False)
        yield Answer(PrefixCacheReset())


def _summary(report: RefitReport) -> RefitSummary:
    return RefitSummary(
        version=report.version, path=report.path, size_bytes=report.size_bytes, milliseconds=report.milliseconds
    )
