"""Builds the daemon's parts, runs them on one event loop, and ends them in order."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine, MutableMapping
from enum import IntEnum
from typing import Any

import structlog

from refit_protocol.endpoint import socket_path
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    AbortRefit,
    AcknowledgeGeneration,
    AcquireWriter,
    ApplyBucket,
    BeginRefit,
    CancelGeneration,
    CloseSource,
    CommitRefit,
    FinishRefit,
    Generate,
    GetDigest,
    GetLoggerMetrics,
    GetManifest,
    GetStatus,
    Goodbye,
    Heartbeat,
    Hello,
    JoinCollective,
    LoadAdapter,
    LoadModel,
    OpenSource,
    PrepareRefit,
    ReceiveBroadcast,
    ReleaseWriter,
    ReloadWeights,
    ResetPrefixCache,
    RestoreWeights,
    ResumeGeneration,
    Sleep,
    UnloadAdapter,
    ValidateRefit,
    WakeUp,
)
from refit_protocol.states import EngineEvent, EngineState
from refitd import __version__, engine_failure, load_progress, orphans, parent_death, shared_memory, temporary
from refitd import log as logging_setup
from refitd.adapters import Adapters
from refitd.commit import Commit
from refitd.config import RELOADABLE, Config, ConfigError, fixed_changes
from refitd.doctor.devices import read_gpus, visible_uuids
from refitd.endpoint import Endpoint, EndpointError, take_endpoint
from refitd.engine import Engine, EngineInfo, StartupError
from refitd.engine_start import engine_environment
from refitd.gate import Gate
from refitd.generation import Generation
from refitd.http import HttpBindError, HttpServer, reserve_socket
from refitd.lifecycle import Lifecycle
from refitd.liveness import Liveness
from refitd.load_progress import LoadProgress
from refitd.metrics import RefitdMetrics
from refitd.notify import Notifier, extending
from refitd.observe import observe
from refitd.power import Power
from refitd.refit import Refit
from refitd.room import room_problem
from refitd.sampler import LoggerMetricsSampler, read_vllm_figures
from refitd.server import Server
from refitd.sessions import Sessions

LOAD_EXTENSION_SECONDS = 3600.0
LAST_REPLIES_SECONDS = 2.0
LAST_LOOK_SECONDS = 0.25
# Trainers that wait for a model ask every 0.2 s whether it is there.
LAST_WORDS_SECONDS = 1.0
STATUS_AFTER_SECONDS = 0.002
# There is no engine yet, or none any more.
NO_ENGINE = frozenset({EngineState.UNLOADED, EngineState.LOADING, EngineState.DEAD})

log = structlog.get_logger()


class ExitCode(IntEnum):
    """What the process ends with, for its supervisor."""

    OK = 0
    INTERNAL = 1
    CONFIGURATION = 2
    STARTUP = 3
    ENGINE_DIED = 4


Reload = Callable[[], Config]


def serve(config: Config, environment: MutableMapping[str, str], reload: Reload, *, replace: bool = False) -> ExitCode:
    """Runs the daemon until it is told to stop, or its engine dies.

    `reload` reads the configuration again, on SIGHUP; `replace` ends an engine that an earlier run left behind.
    """
    import uvloop

    logging_setup.configure(config.log.level, config.log.json_lines)
    logging_setup.export(environment, config.log.vllm_level, config.log.json_lines)
    for name, value in engine_environment(config).items():
        environment.setdefault(name, value)
    parent_death.export(environment)
    raise_descriptor_limit()
    try:
        lock = take_endpoint(config)
    except EndpointError as error:
        log.error(str(error))
        return ExitCode.CONFIGURATION
    try:
        _settle_orphans(config, environment, replace=replace)
        reserved = reserve_socket(config.http.host, config.http.port) if config.http.enabled else None
        app = App(config, lock, reserved, Notifier(environment), reload)
        app.lifecycle.room_problem = lambda: room_problem(config, environment)
        return uvloop.run(app.run())
    except (EndpointError, HttpBindError) as error:
        log.error(str(error))
        return ExitCode.CONFIGURATION
    except StartupError as error:
        log.error(str(error))
        return ExitCode.STARTUP
    finally:
        _remove_files(config)
        lock.release()


def _settle_orphans(config: Config, environment: MutableMapping[str, str], *, replace: bool) -> None:
    """Raises `StartupError` where an engine of an earlier run still lives and may not, or cannot, be ended."""
    gpus = visible_uuids(read_gpus(), environment)
    found = orphans.find(config.runtime_directory, gpus)
    if found and not replace:
        named = ", ".join(str(orphan) for orphan in found)
        raise StartupError(f"an engine of an earlier run still lives: {named}; end it with --replace")
    if left := orphans.end(found):
        raise StartupError(f"could not end {', '.join(str(orphan) for orphan in left)}")
    shared_memory.clear(config.runtime_directory)
    orphans.mark(environment, config.runtime_directory, gpus)
    load_progress.prepare(environment, config.runtime_directory)
    engine_failure.prepare(environment, config.runtime_directory)
    temporary.clear(config.runtime_directory)
    try:
        temporary.prepare(environment, config.runtime_directory)
    except OSError as error:
        raise StartupError(f"no temporary directory: {error}") from error


def _remove_files(config: Config) -> None:
    """What the engine's processes have left in the file system, where they could not do it themselves."""
    for remove in (temporary.clear, load_progress.forget, engine_failure.forget):
        remove(config.runtime_directory)


def raise_descriptor_limit() -> None:
    """Every session takes two descriptors, its connection and its pidfd; the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class App:
    """All parts of one daemon. `run` is called once."""

    def __init__(
        self,
        config: Config,
        lock: Endpoint,
        reserved: socket.socket | None,
        notifier: Notifier,
        reload: Reload,
    ) -> None:
        epoch = time.time_ns() // 1_000_000
        self._config = config
        self._lock = lock
        self._notifier = notifier
        self._reload = reload
        self._stop = asyncio.Event()
        self._status_due: asyncio.TimerHandle | None = None
        self._stop_now = asyncio.Event()
        self._death: BaseException | None = None
        self._bug: BaseException | None = None
        self._load_failure: Exception | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.gate = Gate(config.refit.gate_wait_seconds, config.refit.max_waiting_requests)
        self.engine = Engine(config)
        self.liveness = Liveness(config.engine, self.engine, self._is_trusted)
        self.sessions = Sessions(config.server, epoch, local=socket_path(config.endpoint) is not None)
        self.commit = Commit(config.refit, self.engine, self.gate)
        self.refit = Refit(config, self.engine, self.gate, self.commit, epoch)
        self.adapters = Adapters(config, self.engine, self.gate)
        self.generation = Generation(config, self.engine, self.gate, self.adapters)
        self.lifecycle = Lifecycle(self.engine, self.gate, self.commit, self.refit, self.sessions, self.adapters, epoch)
        self.metrics = RefitdMetrics()
        self.power = Power(config.refit, self.engine, self.gate, self.commit)
        self.server = self._build_server()
        self.http = None if reserved is None else HttpServer(config.http, reserved, self.gate)
        self._connect()

    async def run(self) -> ExitCode:
        """The daemon's whole life; the exit code says why it ended."""
        self._catch_signals()
        self.server.bind(self._config.endpoint)
        self._lock.admit_group()
        self._tend(self._spawn(self.sessions.expire(), "lease-expiry"))
        self._tend(self._spawn(self.liveness.watch(), "liveness"))
        if self.http is not None:
            self._tend(await self.http.start())
            self.lifecycle.http_url = self.http.base_url
        log.info("listening", endpoint=self._config.endpoint, pid=os.getpid())
        try:
            if not self._config.defer_load:
                await self._load_or_stop()
            await self._serve_until_stopped()
        except (ConfigError, StartupError) as error:
            log.error(str(error))
            log.debug("why", exc_info=error)
            await self._tell_who_waits()
            return ExitCode.CONFIGURATION if isinstance(error, ConfigError) else ExitCode.STARTUP
        finally:
            await self._end()
        return self._exit_code

    async def _tell_who_waits(self) -> None:
        """Sessions that wait for the model read in the status why there will be none."""
        if len(self.sessions):
            await asyncio.sleep(LAST_WORDS_SECONDS)

    @property
    def _exit_code(self) -> ExitCode:
        if self._death is not None:
            return ExitCode.ENGINE_DIED
        return ExitCode.OK if self._bug is None else ExitCode.INTERNAL

    # --- parts --------------------------------------------------------------------------------------------------------

    def _build_server(self) -> Server:
        sessions, refit, generation, lifecycle = self.sessions, self.refit, self.generation, self.lifecycle
        buckets = refit.buckets
        return Server(
            self._config.server,
            sessions,
            instant={
                Hello: sessions.hello,
                Heartbeat: sessions.heartbeat,
                Goodbye: sessions.goodbye,
                GetStatus: lifecycle.status,
                GetManifest: lifecycle.manifest,
                GetLoggerMetrics: lifecycle.logger_metrics,
                CancelGeneration: generation.cancel,
                ResumeGeneration: generation.resume,
                AcknowledgeGeneration: generation.acknowledge,
            },
            lengthy={
                Generate: generation.generate,
                GetDigest: refit.digest,
                AcquireWriter: refit.acquire_writer,
                ReleaseWriter: refit.release_writer,
                OpenSource: refit.open_source,
                CloseSource: refit.close_source,
                ValidateRefit: refit.validate,
                JoinCollective: refit.join_collective,
                CommitRefit: refit.commit,
                PrepareRefit: refit.prepare,
                BeginRefit: buckets.begin,
                ApplyBucket: buckets.apply_bucket,
                ReceiveBroadcast: buckets.receive_broadcast,
                FinishRefit: buckets.finish,
                AbortRefit: buckets.abort,
                RestoreWeights: refit.restore,
                ReloadWeights: refit.reload,
                LoadModel: lifecycle.load_model,
                LoadAdapter: self.adapters.load,
                UnloadAdapter: self.adapters.unload,
                ResetPrefixCache: lifecycle.reset_prefix_cache,
                Sleep: self.power.sleep,
                WakeUp: self.power.wake_up,
            },
        )

    def _connect(self) -> None:
        self.generation.send = self.server.send
        self.generation.can_send = self.server.can_send
        self.sessions.on_resumed = self.generation.session_resumed
        self.server.on_writable = self.generation.flush_identity
        self.commit.abort_requests = self._abort_requests
        self.sessions.on_close = [self.generation.session_closed, self.refit.session_closed]
        self.engine.on_death = self._engine_died
        self.liveness.on_sign = self._alive
        self.liveness.on_answer = self.metrics.engine_answered
        self.liveness.on_missed = self.metrics.engine_missed_answer
        self.liveness.on_death = self._engine_died
        self.engine.on_nan = self.commit.cleaning.soon
        self.engine.meanwhile = self.commit.rehearse
        self.adapters.on_change = self._serve_adapters
        self.lifecycle.on_loaded = [self._model_loaded]
        self.lifecycle.read_progress = LoadProgress(self._config.runtime_directory).read
        if self._config.defer_load:
            self.lifecycle.on_failed = self._load_failed
        self.lifecycle.generated_tokens = lambda: self.generation.generated_tokens
        self.gate.on_change = lambda _state: self._say_status_soon()
        observe(self.metrics, self)

    def _load_failed(self, error: Exception) -> None:
        self._load_failure = error
        self._stop.set()

    async def _abort_requests(self, error: ErrorCode) -> None:
        await self.generation.abort_all(error)
        if self.http is not None:
            await self.http.abort_all(error)

    def _serve_adapters(self) -> None:
        if self.http is not None:
            self.http.serve_adapters(self.adapters.loaded.values())

    async def _model_loaded(self, info: EngineInfo) -> None:
        await self.adapters.load_configured()
        if self.http is not None:
            await self.http.serve_model(self.engine, info, self.adapters.uses)
        self._serve_adapters()
        metrics = self._config.metrics
        sampler = LoggerMetricsSampler(metrics.sample_interval_seconds, read_vllm_figures, metrics.max_samples)
        sampler.start()
        self.lifecycle.sampler = sampler
        self.metrics.model_loaded(info.model.name, __version__, info.vllm_version, info.load_seconds)
        orphans.record(self._config.runtime_directory, info.devices)
        shared_memory.record(self._config.runtime_directory)
        load_progress.forget(self._config.runtime_directory)

    # --- running ------------------------------------------------------------------------------------------------------

    async def _load_or_stop(self) -> None:
        load = self._spawn(self.lifecycle.load(), "start-up")
        stop = self._spawn(self._stop.wait(), "stop-while-loading")
        with extending(self._notifier, period_seconds=5.0, limit_seconds=LOAD_EXTENSION_SECONDS):
            await asyncio.wait({load, stop}, return_when=asyncio.FIRST_COMPLETED)
        if load.done():
            stop.cancel()
            load.result()
        else:
            self._leave_while_loading()

    def _leave_while_loading(self) -> None:
        """vLLM's load cannot be interrupted; our end ends its children, who watch us."""
        log.info("stopped while the model was loading")
        self._notifier.stopping()
        _remove_files(self._config)
        self._lock.release()
        os._exit(self._exit_code)

    async def _serve_until_stopped(self) -> None:
        self._notifier.ready(self._status_text())
        log.info("ready", state=self.gate.state.value)
        await self._stop.wait()
        if self._load_failure is not None:
            raise self._load_failure
        if self._death is None:
            await self._drain()

    def _alive(self) -> None:
        self._notifier.watchdog()
        self._say_status()

    def _is_trusted(self) -> bool:
        """An engine that works on a call cannot answer another: it is trusted until that call's own deadline."""
        return self.gate.state in NO_ENGINE or self.engine.is_asked

    def _engine_died(self, error: BaseException) -> None:
        """Whoever waits for the engine is told, also while the daemon is stopping: then there is nothing to drain."""
        if self.gate.state is EngineState.DEAD:
            return
        reason = engine_failure.read(self._config.runtime_directory) or str(error) or type(error).__name__
        log.error("the engine died", reason=reason)
        self.gate.failed(ProtocolError(ErrorCode.ENGINE_DEAD, f"the engine died: {reason}"))
        self.engine.end_calls()
        self.gate.step(EngineEvent.DIED)
        self._tend(self._spawn(self._abort_requests(ErrorCode.ENGINE_DEAD), "abort-after-death"))
        if self._stop.is_set():
            self._stop_now.set()
        else:
            self._death = error
            self._stop.set()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        loop.add_signal_handler(signal.SIGHUP, self._reload_settings)

    def _reload_settings(self) -> None:
        """Takes over what can change while serving; a bad file changes nothing."""
        self._notifier.reloading()
        try:
            fresh = self._reload()
        except ConfigError as error:
            log.error("configuration not reloaded", reason=str(error))
        else:
            fixed = fixed_changes(self._config, fresh)
            self._config = self._config.model_copy(update={name: getattr(fresh, name) for name in RELOADABLE})
            logging_setup.configure(self._config.log.level, self._config.log.json_lines)
            log.info("configuration reloaded", needs_restart=fixed)
        self._notifier.ready(self._status_text())

    def _on_signal(self, name: str) -> None:
        log.info("signal", name=name, again=self._stop.is_set())
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def _drain(self) -> None:
        """New work is refused, running work finishes or is aborted; a second signal ends the waiting."""
        settings = self._config.shutdown
        self._notifier.stopping("draining")
        with extending(self._notifier, period_seconds=5.0, limit_seconds=settings.drain_seconds + 30.0):
            drain = self._spawn(self._drain_work(), "drain")
            now = self._spawn(self._stop_now.wait(), "stop-now")
            done, waiting = await asyncio.wait(
                {drain, now}, timeout=settings.drain_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            for task in waiting:
                task.cancel()
            await self._abort_requests(ErrorCode.DRAINING)
        if drain in done:
            drain.result()

    async def _drain_work(self) -> None:
        await self.refit.settle()
        if self.gate.state is EngineState.DEAD:
            return
        self.gate.step(EngineEvent.DRAIN_STARTED)
        if self._config.shutdown.policy == "finish":
            await self._until_idle()

    async def _until_idle(self) -> None:
        try:
            await self.gate.until_idle(self._config.shutdown.drain_seconds)
        except ProtocolError as late:
            log.warning("not all requests are finished", reason=late.message)

    async def _end(self) -> None:
        """Last replies go out, then sessions, engine and socket go, in this order."""
        self._notifier.stopping()
        await self._finish_requests()
        await self.server.flush(LAST_REPLIES_SECONDS)
        if self.http is not None:
            await self.http.stop(grace_seconds=1.0)
        await self.sessions.close_all()
        if self.lifecycle.sampler is not None:
            await self.lifecycle.sampler.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.engine.stop()
        self.adapters.close()
        orphans.forget(self._config.runtime_directory)
        shared_memory.clear(self._config.runtime_directory)
        # A client's libzmq forgets what it has not read by the time its peer is gone.
        await asyncio.sleep(LAST_LOOK_SECONDS)
        self.server.close()
        log.info("stopped")

    async def _finish_requests(self) -> None:
        """Requests that have been ended get a moment to say so."""
        if self.server.tasks:
            await asyncio.wait(set(self.server.tasks), timeout=LAST_REPLIES_SECONDS)
        for task in list(self.server.tasks):
            task.cancel()
        await asyncio.gather(*self.server.tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tend(self, task: asyncio.Task[Any]) -> None:
        """For tasks that nobody waits for: without one that fails the daemon would live on as half a daemon."""
        task.add_done_callback(self._see_end)

    def _see_end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("bug in the daemon, which stops", task=task.get_name(), exc_info=error)
        self._bug = error
        self._stop.set()

    # --- what the operator sees ---------------------------------------------------------------------------------------

    def _say_status_soon(self) -> None:
        """A moment later: a refit changes the state twice, and the trainer waits for its answer."""
        if self._status_due is None:
            self._status_due = asyncio.get_running_loop().call_later(STATUS_AFTER_SECONDS, self._say_status)

    def _say_status(self) -> None:
        self._status_due = None
        self._notifier.status(self._status_text())

    def _status_text(self) -> str:
        if self.gate.state is EngineState.LOADING:
            return f"{self._config.model}: {self.lifecycle.load_phase}, {self.lifecycle.progress:.0%} of the weights"
        return (
            f"{self._config.model}: {self.gate.state.value}, version {self.gate.version}, "
            f"{self.gate.running} running, {len(self.sessions)} sessions"
        )
