"""NeMo-RL's asynchronous vLLM worker, method by method, on top of a daemon: see docs/reference-interface.md.

Batches are mappings of torch tensors, padded on the right: `input_ids` (prompts, width) and `input_lengths` (prompts,)
go in; for each prompt a batch of one sample comes out as soon as it is finished. Failures raise `RefitdError`.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import ModelInfo, SleepTag, Status
from refit_protocol.states import NOT_SERVABLE, EngineState
from refit_protocol.tensors import DType, TensorShape
from refit_trainer.aio import AsyncDaemon
from refit_trainer.child import ChildDaemon
from refit_trainer.client import LoopThread
from refit_trainer.errors import ClientClosed, DaemonUnreachable, LayoutMismatch, RefitdError, RequestTimedOut
from refit_trainer.stream import Sample
from refit_trainer.worker_batches import Batch, Work, exhausted, finished, split, text_work
from refit_trainer.worker_config import WorkerConfig

_Result = TypeVar("_Result")

# A daemon that was just started imports vLLM before it listens.
_START_SECONDS = 300.0
_CONNECT_SECONDS = 2.0
_REFIT_SECONDS = 600.0
_LOOK_EVERY_SECONDS = 0.02
_BETWEEN_VERSIONS = (EngineState.REFITTING, EngineState.RESTORING)


@dataclass(frozen=True)
class _Served:
    """A version of the weights, of the daemon that `epoch` stands for."""

    epoch: int
    version: int

    def follows(self, seen: _Served) -> bool:
        return self.version > (seen.version if self.epoch == seen.epoch else 0)


class GenerationWorker:
    """One daemon, connected to or started as a child process that ends with this one.

    Constructed and used like the reference's `VllmAsyncGenerationWorker`. Methods may be awaited on any event loop.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        bundle_indices: Sequence[int] | None = None,  # noqa: ARG002 - placement is Ray's, and there is no Ray here
        fraction_of_gpus: float = 1.0,  # noqa: ARG002
        seed: int | None = None,
        extra_env_vars: Sequence[str] | None = None,  # noqa: ARG002 - a child inherits all variables
        defer_model_load: bool = False,
    ) -> None:
        """See `WorkerConfig` for `config`. With `defer_model_load` only the daemon is there, and its URL reserved."""
        self._config = WorkerConfig(config, seed)
        for name in self._config.ignored:
            warnings.warn(f"the generation worker ignores {name} of its configuration", stacklevel=2)
        self._child: ChildDaemon | None = None
        self._session: AsyncDaemon | None = None
        self._model: ModelInfo | None = None
        self._seen = _Served(0, 0)
        self._collective: int | None = None
        self._announced: list[TensorShape] = []
        self.vllm_device_ids: list[str] | None = None
        self._thread = LoopThread()
        try:
            self._session = self._thread.call(self._connect())
            if not defer_model_load:
                self.load_model()
        except BaseException:
            self._end()
            raise

    @property
    def endpoint(self) -> str:
        """Where a trainer connects to refit this worker's engine."""
        endpoint = self._config.endpoint if self._child is None else self._child.endpoint
        assert endpoint is not None, "a worker has a daemon"
        return endpoint

    # --- the engine's life --------------------------------------------------------------------------------------------

    def load_model(self) -> None:
        """Returns when the model can be served; does nothing where it is loaded already.

        Raises `SettingsMismatch` where `endpoint` names a daemon of another model or `max_model_len`.
        """
        model = self._wait(self._daemon.load_model())
        if self._child is None:
            self._config.check(model)
        self._model = model
        self._seen = _served(self._wait(self._daemon.status()))

    async def post_init_async(self) -> None:
        self.vllm_device_ids = await self.report_device_id_async()

    async def get_reserved_url(self) -> str | None:
        """The URL of the OpenAI endpoint, held from before the model loads; None where HTTP is off."""
        return (await self._status()).http_url

    async def report_dp_openai_server_base_url(self) -> str | None:
        """The same URL, once it is served."""
        status = await self._status()
        return status.http_url if status.model is not None else None

    async def report_device_id_async(self) -> list[str]:
        """One per worker of the engine: UUIDs of GPUs, or `cpu`."""
        return (await self._status()).devices

    async def reset_prefix_cache_async(self) -> None:
        """Raises `cache_not_reset` where running requests hold it."""
        await self._call(self._daemon.reset_prefix_cache())

    async def sleep_async(self, level: Literal[1, 2] = 1) -> None:
        """Running requests finish first."""
        await self._call(self._daemon.sleep(level))

    async def wake_up_async(self, tags: Sequence[SleepTag] | None = None) -> None:
        await self._call(self._daemon.wake_up(None if tags is None else list(tags)))

    def get_vllm_logger_metrics(self) -> dict[str, list[float]]:
        """The engine's figures since they were last cleared, one list each, sampled by the daemon."""
        return self._wait(self._daemon.logger_metrics()).samples

    def clear_vllm_logger_metrics(self) -> None:
        self._wait(self._daemon.logger_metrics(clear=True))

    async def shutdown(self) -> bool:
        """Ends the session, and the daemon if it is our own, with its sampling; True also the second time."""
        await asyncio.get_running_loop().run_in_executor(None, self._end)
        return True

    # --- weights ------------------------------------------------------------------------------------------------------

    async def prepare_refit_info_async(self, state_dict_info: Mapping[str, Any]) -> None:
        """Compares what the trainer will send, `{name: (shape, dtype)}`, with the names and shapes the engine needs.

        Raises `LayoutMismatch` naming the differences, before anything is sent.
        """
        manifest = await self._call(self._daemon.manifest())
        needed = {tensor.name: tensor for tensor in manifest.tensors}
        missing = [
            tensor.name
            for tensor in manifest.tensors
            if tensor.name not in state_dict_info and not tensor.optional and tensor.alias_of is None
        ]
        unexpected = [name for name in state_dict_info if name not in needed]
        misshapen = [
            name
            for name, (shape, _) in state_dict_info.items()
            if name in needed and tuple(shape) != tuple(needed[name].shape)
        ]
        if missing or unexpected or misshapen:
            raise LayoutMismatch(
                f"the trainer's tensors do not fit: missing {missing}, unexpected {unexpected}, misshapen {misshapen}",
                details={"missing": missing, "unexpected": unexpected, "misshapen": misshapen},
            )
        self._announced = [
            TensorShape(name=name, dtype=_dtype(dtype), shape=tuple(shape))
            for name, (shape, dtype) in state_dict_info.items()
        ]

    async def update_weights_via_ipc_zmq_async(self) -> bool:
        """Returns True once the engine serves a version that it did not serve at the last call (or at the start).

        The trainer brings it: `Daemon.connect(worker.endpoint).refit(model)`, at the same time or before. A daemon that
        was restarted counts its versions anew, and the weights it was started with are none of them. Raises what the
        daemon says where the weights are torn, and `RequestTimedOut` where none come.
        """
        give_up_at = time.monotonic() + _REFIT_SECONDS
        while not _served(status := await self._status()).follows(self._seen) or status.state in _BETWEEN_VERSIONS:
            if status.state in (EngineState.TORN, EngineState.DRAINING, EngineState.DEAD):
                code, advice = NOT_SERVABLE[status.state]
                raise RefitdError(advice, code=code)
            if time.monotonic() > give_up_at:
                raise RequestTimedOut(f"no new weights came within {_REFIT_SECONDS:g} s")
            await asyncio.sleep(_LOOK_EVERY_SECONDS)
        self._seen = _served(status)
        return True

    async def init_collective_async(
        self, rank_prefix: int, ip: str, port: int, world_size: int, train_world_size: int
    ) -> None:
        """The engine's workers become ranks `train_world_size + rank_prefix` and up of the group that the trainer's
        rank 0 hosts with `BroadcastGroup.host(ip, port, world_size)`.

        Raises `collective_failed` in bounded time, also for a plain torch.distributed group.
        """
        joined = await self._call(self._daemon.join_collective(ip, port, world_size, train_world_size + rank_prefix))
        self._collective = joined.source

    async def update_weights_from_collective_async(self) -> bool:
        """Commits what the trainer broadcasts meanwhile with `BroadcastGroup.broadcast`; returns True.

        The tensors are those of `prepare_refit_info_async`, in its order, else those of the engine's manifest.
        """
        if self._collective is None:
            raise RefitdError("no group was joined: call init_collective_async() first", code=ErrorCode.NOT_ALLOWED_NOW)
        tensors = self._announced or await self._needed()
        report = await self._call(self._daemon.receive_refit(self._collective, tensors))
        self._seen = _Served(self._daemon.welcome.epoch, report.version)
        return True

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate_async(self, data: Mapping[str, Any], greedy: bool = False) -> AsyncGenerator[tuple[int, Batch]]:
        """Yields (index in the batch, batch of one sample) as prompts are finished; see `worker_batches.finished`.

        A prompt that leaves no room to generate comes back as it is, `truncated`. Raises ValueError for a batch that
        is none, `RefitdError` for what the daemon refuses and for an output that the engine gave up on.
        """
        pad = self._config.pad_token_id
        works = split(data, self._config.stop_strings, pad if self._config.checks_padding else None)
        width = data["input_ids"].shape[1]
        prompts = {index: prompt for work in works for index, prompt in zip(work.indices, work.prompts, strict=True)}
        context = await self._context()
        full = frozenset(index for index, prompt in prompts.items() if len(prompt) >= context)
        for index in sorted(full):
            yield index, exhausted(prompts[index], width, pad)
        async for index, sample in self._samples([_without(work, full) for work in works], greedy=greedy, text=False):
            yield index, finished(sample, prompts[index], width, pad)

    async def generate_text_async(
        self, data: Mapping[str, Any], greedy: bool = False
    ) -> AsyncGenerator[tuple[int, Batch]]:
        """Yields (index in the batch, `{"texts": [text]}`) for the texts of `data["prompts"]` as they are finished."""
        works = text_work(data, self._config.stop_strings)
        async for index, sample in self._samples(works, greedy=greedy, text=True):
            yield index, {"texts": [sample.text or ""]}

    async def _samples(self, works: Sequence[Work], *, greedy: bool, text: bool) -> AsyncIterator[tuple[int, Sample]]:
        """Of all requests at once, in the order in which they end. Leaving it cancels what has not ended."""
        arrived: asyncio.Queue[tuple[int, Sample] | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: tuple[int, Sample] | Exception) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, item)

        works = [work for work in works if work.prompts]
        running = [self._thread.submit(self._collect(work, put, greedy=greedy, text=text)) for work in works]
        try:
            for _ in range(sum(len(work.prompts) for work in works)):
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            for future in running:
                future.cancel()

    async def _collect(
        self, work: Work, put: Callable[[tuple[int, Sample] | Exception], None], *, greedy: bool, text: bool
    ) -> None:
        """On the client's own loop: one request, whatever ends it reaches the consumer."""
        sampling = self._config.sampling(work.stop, greedy=greedy, text=text)
        try:
            async with self._daemon.generate(
                work.prompts,
                sampling,
                routed_experts=self._config.routed_experts,
                deadline_seconds=self._config.generation_seconds,
            ) as samples:
                async for sample in samples:
                    put((work.indices[sample.prompt], _good(sample)))
        # The boundary of the task: its error belongs to whoever iterates.
        except Exception as error:  # noqa: BLE001
            put(error)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _needed(self) -> list[TensorShape]:
        manifest = await self._call(self._daemon.manifest())
        return [
            TensorShape(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)
            for tensor in manifest.tensors
            if not tensor.optional and tensor.alias_of is None
        ]

    @property
    def _daemon(self) -> AsyncDaemon:
        assert self._session is not None, "the constructor connects"
        return self._session

    async def _connect(self) -> AsyncDaemon:
        """To the daemon that was named, or to a new one as soon as it listens."""
        if self._config.endpoint is not None:
            return await AsyncDaemon.connect(self._config.endpoint, client="generation worker")
        self._child = ChildDaemon(self._config.daemon_settings())
        give_up_at = time.monotonic() + _START_SECONDS
        while True:
            self._child.check()
            try:
                return await AsyncDaemon.connect(self._child.endpoint, _CONNECT_SECONDS, client="generation worker")
            except DaemonUnreachable:
                if time.monotonic() > give_up_at:
                    raise

    async def _context(self) -> int:
        if self._model is None:
            self._model = (await self._status()).model
        if self._model is None:
            raise RefitdError("the model is not loaded yet: call load_model()", code=ErrorCode.LOADING)
        return self._model.max_model_len

    async def _status(self) -> Status:
        return await self._call(self._daemon.status())

    async def _call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Awaited on the caller's loop, run on the client's."""
        if self._thread.loop.is_closed():
            work.close()
            raise ClientClosed("the worker has been shut down")
        return await asyncio.wrap_future(self._thread.submit(work))

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self._thread.call(work)

    def _end(self) -> None:
        if not self._thread.loop.is_closed():
            try:
                if self._session is not None:
                    self._thread.call(self._session.close())
                if self._child is not None:
                    self._child.stop()
            finally:
                self._thread.stop()


def _served(status: Status) -> _Served:
    return _Served(status.epoch, status.version)


def _without(work: Work, full: frozenset[int]) -> Work:
    kept = [(index, prompt) for index, prompt in zip(work.indices, work.prompts, strict=True) if index not in full]
    return Work([index for index, _ in kept], [prompt for _, prompt in kept], work.stop)


def _good(sample: Sample) -> Sample:
    """Raises where the engine, or somebody else, ended the output."""
    if sample.finish_reason in ("stop", "length"):
        return sample
    code = sample.error or ErrorCode.CANCELLED
    raise RefitdError(f"prompt {sample.prompt} ended early: {sample.finish_reason}", code=code)


def _dtype(dtype: object) -> DType:
    """Of a `torch.dtype`, or of its name."""
    name = str(dtype).removeprefix("torch.")
    try:
        return DType(name)
    except ValueError:
        raise LayoutMismatch(f"dtype {name} cannot be sent, only {', '.join(DType)}") from None
