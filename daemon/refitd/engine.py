"""The only client of vLLM: starts it, hands requests in and steps out, reaches its workers, knows whether it is alive.

Everything here runs on the event loop's thread except the load itself, which blocks and so has a thread of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import msgspec
import structlog

from refit_protocol.awake import awake
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import ManifestTensor, ModelInfo, Sampling
from refitd import engine_failure
from refitd.config import Config, ConfigError
from refitd.engine_failure import one_line
from refitd.engine_start import start
from refitd.lines import LineClosedError, Lines, encoded, open_lines
from refitd.ranks import combine_manifests
from refitd.worker_error import raise_worker_error

if TYPE_CHECKING:
    import numpy as np

    from refitd.compat import StampedLLM

# For an answer over a line: longer than a GPU takes to copy what it can hold. A CPU needs its cores for the copy.
AWAKE_SECONDS = 0.025
MAX_ACCEPTED = 256

log = structlog.get_logger()

_Result = TypeVar("_Result")


class StartupError(Exception):
    """The engine could not be started; the message is for the operator."""


class StepLogprobs(Protocol):
    """Row i belongs to new token i; column 0 is the sampled token, the others the top alternatives by rank."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray


class StepOutput(Protocol):
    """What one engine step made for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: StepLogprobs | None
    new_prompt_logprobs_tensors: Any
    finish_reason: Any
    stop_reason: int | str | None
    prefill_stats: Any
    routed_experts: np.ndarray | None
    num_nans_in_logits: int


class Detokenizer(Protocol):
    """vLLM's own, one per output: tokens in, text and stop strings out."""

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None: ...

    def get_next_output_text(self, finished: bool, delta: bool) -> str: ...

    def num_output_tokens(self) -> int: ...


# A request in vLLM's form; nobody but `compat` looks into it.
PreparedRequest: TypeAlias = Any


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that the workers hold; each load has an `id` and a directory of its own."""

    name: str
    id: int
    directory: Path


@dataclass(frozen=True)
class RequestKind:
    """All that vLLM looks at in a request besides its prompt; `sampling` is encoded."""

    sampling: bytes
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    priority: int
    adapter: Adapter | None


@dataclass(frozen=True)
class EngineInfo:
    """What the loaded engine says of itself, in a form the wire can carry."""

    model: ModelInfo
    manifest: list[ManifestTensor]
    devices: list[str]
    vllm_version: str
    logprobs_mode: str
    load_seconds: float
    max_logprobs: int
    has_tokenizer: bool
    priorities: bool
    routed_experts: bool


class Engine:
    """Owns the AsyncLLM from `load` to `stop`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._llm: StampedLLM | None = None
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-load")
        self._lines: Lines | None = None
        self._awake_seconds = 0.0
        self._direct_calls: set[asyncio.Future[list[dict[str, Any]]]] = set()
        self._calls = 0
        self._changing_over = asyncio.Lock()
        self._still_after: int | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.info: EngineInfo | None = None
        self.on_step: Callable[[Sequence[StepOutput]], None] = lambda _outputs: None
        self.on_death: Callable[[BaseException], None] = lambda _error: None
        self.on_nan: Callable[[], None] = lambda: None
        # In every turn of the loop while it is awake for an answer.
        self.meanwhile: Callable[[], None] = lambda: None
        # Before the workers do anything else, as long as a refit stands by.
        self.give_way: Callable[[], Awaitable[None]] | None = None
        self._dead = False
        # Each with whether its answer may take long.
        self._waiting: dict[asyncio.Timeout, bool] = {}
        self._accepted: dict[RequestKind, PreparedRequest] = {}

    @property
    def llm(self) -> StampedLLM:
        if self._llm is None:
            raise ProtocolError(ErrorCode.LOADING, "the model is not loaded yet")
        return self._llm

    async def load(self) -> EngineInfo:
        """Raises `StartupError`. Takes from seconds to minutes; the loop stays free."""
        started = time.monotonic()
        try:
            self._llm = await asyncio.get_running_loop().run_in_executor(self._loader, start, self._config)
            await self._llm.attach(lambda outputs: self.on_step(outputs), lambda error: self.on_death(error))
            self._llm.on_nan = lambda: self.on_nan()
            self._llm.before_add = self._require_nothing_standing
            await self._warm_up()
            self.info = await self._describe(time.monotonic() - started)
            if not self.llm.has_replicas:
                await self._open_lines(len(self.info.devices))
            if "cpu" not in self.info.devices:
                self._awake_seconds = AWAKE_SECONDS
        except ConfigError:
            raise
        # vLLM raises whatever its configuration, loaders and child processes raise; the operator needs the reason.
        except Exception as error:
            raise StartupError(f"the engine did not start: {self._failure(error)}") from error
        return self.info

    def _require_nothing_standing(self) -> None:
        """Its trainer might write the weights in the middle of a step."""
        assert self.give_way is None, "no request passes the gate while a refit stands by"

    def _failure(self, error: Exception) -> str:
        """What failed in an engine process, if it has said so; `error` is what reached this one."""
        return engine_failure.read(self._config.runtime_directory) or one_line(error)

    async def _describe(self, load_seconds: float) -> EngineInfo:
        workers = await self.call_workers("refitd_describe", timeout_seconds=120.0)
        from refitd import compat

        model_config = self.llm.model_config
        return EngineInfo(
            model=compat.model_info(self.llm, self._config.served_model_name, self._config.model),
            manifest=combine_manifests(workers),
            devices=[worker["device_uuid"] or worker["device"] for worker in workers],
            vllm_version=compat.VLLM_VERSION,
            logprobs_mode=str(model_config.logprobs_mode),
            load_seconds=load_seconds,
            max_logprobs=self._config.engine.max_logprobs,
            has_tokenizer=self.llm.tokenizer is not None,
            priorities=self._config.engine.scheduling_policy == "priority",
            routed_experts=compat.returns_routed_experts(self.llm),
        )

    # --- workers ------------------------------------------------------------------------------------------------------

    async def call_workers(
        self,
        method: str,
        *args: Any,
        timeout_seconds: float,
        writes: bool = False,
        direct: bool = False,
        standing: bool = False,
    ) -> list[dict[str, Any]]:
        """One answer per worker of each replica, by rank. Raises `WorkerError` if any refuses, `engine_dead` when late.

        What stands by gives way to every call but those of `standing`, its own.

        `direct` allows the short way, for calls that need nothing of vLLM's: it is taken while the engine stands still.
        vLLM's own RPC timeout is not used: after it expires every later call gets the answer of the one before.
        """
        while not standing and self.give_way is not None:
            await self.give_way()
        answers = await self._answer(self._sent(method, args, direct), method, timeout_seconds)
        raise_worker_error(answers, writes=writes)
        return list(answers)

    def rehearse_in_workers(self, source: int) -> None:
        """Has the workers do what comes first in a refit from this source, while the caller does what comes before it:
        a second time takes them a fraction. Nothing where it cannot be done directly, or on CPUs, which are busy with
        the caller's own work, or where a refit stands by: it would end, whether it was rung for or not."""
        if self.give_way is not None:
            return
        if self._awake_seconds and (answers := self._sent_directly("refitd_rehearse", (source,))) is not None:
            # The calls behind it are told whatever there is to know.
            answers.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _sent(self, method: str, args: Sequence[Any], direct: bool) -> Awaitable[list[dict[str, Any]]]:
        answers = self._sent_directly(method, args) if direct else None
        return self._call_through_vllm(method, args) if answers is None else self._heard(answers)

    def _sent_directly(self, method: str, args: Sequence[Any]) -> asyncio.Future[list[dict[str, Any]]] | None:
        # Calls are answered in the order in which they were made: the two ways are never used at the same time.
        if self._lines is None or not self.is_still or self._calls or (message := encoded(method, args)) is None:
            return None
        answers = self._lines.call(message)
        self._direct_calls.add(answers)
        answers.add_done_callback(self._direct_calls.discard)
        return answers

    async def _heard(self, answers: asyncio.Future[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        try:
            with awake(self._awake_seconds, self.meanwhile):
                return await answers
        # What the worker did is not known, and nothing would answer the calls behind this one.
        except LineClosedError as error:
            self.on_death(error)
            raise ProtocolError(ErrorCode.ENGINE_DEAD, str(error)) from None

    async def _call_through_vllm(self, method: str, args: Sequence[Any]) -> list[dict[str, Any]]:
        llm = self.llm
        self._calls += 1
        try:
            # One behind the other: those that have waited are woken a moment after the last of these is answered.
            async with self._changing_over:
                while self._direct_calls:
                    await asyncio.wait(self._direct_calls)
            return await llm.call_workers(method, tuple(args))
        # Our methods never raise in a worker, so a worker has died; what others answered is lost with it.
        except Exception as error:
            self.on_death(error)
            raise ProtocolError(ErrorCode.ENGINE_DEAD, f"{method} did not reach every worker: {error}") from error
        finally:
            self._calls -= 1

    @property
    def is_still(self) -> bool:
        """Whether nothing can start a step: all requests ended, or frozen, and an answer came from the engine since."""
        return self._still_after == self.llm.requests_added

    @property
    def requests_added(self) -> int:
        """Since it was loaded."""
        return self.llm.requests_added

    async def settle(self, timeout_seconds: float) -> None:
        """To be called when no request runs: afterwards the engine is still until the next one comes."""
        added = self.llm.requests_added
        await self._answer(self.llm.is_sleeping(), "settling", timeout_seconds, lengthy=False)
        self._still_after = added

    async def _open_lines(self, workers: int) -> None:
        async def ask(path: str) -> list[dict[str, Any]]:
            return await self.call_workers("refitd_open_line", path, timeout_seconds=60.0)

        try:
            self._lines = await open_lines(workers, ask)
            await self.settle(self._config.refit.deadline_seconds)
        except (OSError, TimeoutError) as error:
            log.info("no direct lines to the workers", reason=str(error))

    async def _answer(
        self, work: Awaitable[_Result], what: str, timeout_seconds: float, *, lengthy: bool = True
    ) -> _Result:
        """Every call to the engine is bounded: one that does not come back means that the engine hangs."""
        try:
            async with asyncio.timeout(0 if self._dead else timeout_seconds) as waiting:
                self._waiting[waiting] = lengthy
                try:
                    return await work
                finally:
                    del self._waiting[waiting]
        except TimeoutError:
            if self._dead:
                raise ProtocolError(ErrorCode.ENGINE_DEAD, f"the engine died: {what} was not answered") from None
            error = ProtocolError(
                ErrorCode.ENGINE_DEAD, f"{what} did not come back within {timeout_seconds:g} s: the engine hangs"
            )
            self.on_death(error)
            raise error from None

    @property
    def is_asked(self) -> bool:
        """Whether a call is out that may take long; each has a deadline, and an engine that misses one is dead."""
        return any(self._waiting.values())

    def end_calls(self) -> None:
        """To be called when the engine has died: vLLM leaves its callers waiting."""
        self._dead = True
        for waiting in self._waiting:
            if not waiting.expired():
                waiting.reschedule(0)

    async def ping(self) -> None:
        """An RPC that must come back: `check_health` does not see a dead input thread.

        Raises `engine_dead` where it fails, which `on_death` is told first.
        """
        try:
            await self.llm.is_sleeping()
        except ProtocolError:
            raise
        # It asks for nothing that could fail: vLLM hands on what ended its core, whatever that was.
        except Exception as error:
            self.on_death(error)
            raise ProtocolError(ErrorCode.ENGINE_DEAD, f"the engine does not answer: {error}") from error

    # --- requests -----------------------------------------------------------------------------------------------------

    def prepare(
        self,
        token_ids: list[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        stop_token_ids: list[int],
        priority: int,
        adapter: Adapter | None = None,
    ) -> PreparedRequest:
        """A prompt in vLLM's form, to be submitted once per output. Raises `invalid_sampling` with vLLM's reason.

        What vLLM has accepted once it accepts again: most requests of a trainer differ in nothing but the prompt, which
        `prompts` has checked.
        """
        from refitd import compat, compat_grammar

        kind = RequestKind(msgspec.msgpack.encode(sampling), max_tokens, tuple(stop_token_ids), priority, adapter)
        accepted = self._accepted.get(kind)
        if accepted is not None:
            return compat.with_prompt(accepted, token_ids)
        try:
            params = compat.vllm_sampling_params(sampling, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
            prepared = self.llm.prepare(token_ids, params, priority=priority, adapter=adapter)
        except compat.REFUSALS as error:
            raise ProtocolError(ErrorCode.INVALID_SAMPLING, str(error)) from None
        compat_grammar.check_grammar(params.structured_outputs)
        if len(self._accepted) == MAX_ACCEPTED:
            self._accepted.clear()
        self._accepted[kind] = compat.with_prompt(prepared, [])
        return prepared

    def numbered(
        self, prepared: PreparedRequest, request_id: str, *, seed: int | None, version: int
    ) -> tuple[PreparedRequest, Detokenizer | None]:
        """One output's own request, and a detokenizer where text or stop strings are asked for.

        The prefix cache is salted with the version, so KV made by other weights is never found, reset or not.
        """
        from refitd import compat

        request = compat.numbered(prepared, request_id, seed=seed, cache_salt=f"refitd-{version}")
        return request, compat.detokenizer(self.llm, request)

    async def submit(self, request: PreparedRequest) -> None:
        """Its steps come to `on_step` from now on."""
        await self.llm.submit(request)

    async def _warm_up(self) -> None:
        """One token through the whole engine: what it compiles on first use must not cost the first client seconds."""
        from refitd import compat

        params = compat.vllm_sampling_params(Sampling(), max_tokens=1, stop_token_ids=[])
        async for _ in self.llm.generate({"prompt_token_ids": [0]}, params, "refitd-warm-up"):
            pass

    async def withdraw(self, request_ids: list[str]) -> None:
        if request_ids:
            await self.llm.withdraw(request_ids)

    def tokenize(self, text: str) -> list[int]:
        """Raises `unsupported` where the engine runs without a tokenizer."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise ProtocolError(ErrorCode.UNSUPPORTED, "the engine has no tokenizer: send token ids")
        return list(tokenizer.encode(text))

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def load_adapter(self, adapter: Adapter) -> None:
        """Raises `invalid_adapter` with vLLM's reason; no worker holds it then."""
        seconds = self._config.refit.deadline_seconds
        described = adapter.name, adapter.id, str(adapter.directory)
        try:
            answers = await self.call_workers("refitd_load_adapter", *described, timeout_seconds=seconds)
            # With pipeline parallelism each worker has a part of the model.
            unused = set[str].intersection(*(set(answer["unused"]) for answer in answers))
            if unused:
                raise ProtocolError(
                    ErrorCode.INVALID_ADAPTER,
                    f"adapter {adapter.name!r} is for modules that this model does not have: {sorted(unused)[0]}",
                    modules=sorted(unused)[:100],
                )
        except ProtocolError:
            await self.unload_adapter(adapter)
            raise

    async def unload_adapter(self, adapter: Adapter) -> None:
        seconds = self._config.refit.deadline_seconds
        await self.call_workers("refitd_unload_adapter", adapter.id, timeout_seconds=seconds)

    # --- between two versions -----------------------------------------------------------------------------------------

    async def freeze(self, *, clear_cache: bool, timeout_seconds: float) -> None:
        """Stops between two steps, running requests kept; every token made so far has been handed to `on_step`.

        Raises `engine_error`; the engine then goes on as before.
        """
        added = self.llm.requests_added
        try:
            await self._answer(self.llm.freeze(clear_cache=clear_cache), "freezing", timeout_seconds)
            self._still_after = added
        except ProtocolError:
            raise
        # vLLM hands on what its core raised, such as a cache that cannot be reset, as a plain Exception.
        except Exception as error:
            await self.thaw(timeout_seconds)
            raise ProtocolError(ErrorCode.ENGINE_ERROR, f"the engine could not be frozen: {error}") from error

    async def thaw(self, timeout_seconds: float) -> None:
        self._still_after = None
        await self._answer(self.llm.thaw(), "thawing", timeout_seconds)

    def thaw_soon(self, timeout_seconds: float) -> None:
        """Nobody has to wait for it: whatever is sent to the engine from now on is taken after it."""
        self._still_after = None
        task = asyncio.create_task(self.thaw(timeout_seconds), name="thaw")
        self._background.add(task)
        task.add_done_callback(self._thawed)

    def _thawed(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_death(error)

    async def reset_prefix_cache(self, *, preempt_running: bool) -> None:
        """Raises `cache_not_reset` when vLLM answers that it did not."""
        reset = self.llm.reset_prefix_cache(reset_running_requests=preempt_running)
        if not await self._answer(reset, "resetting the prefix cache", self._config.refit.deadline_seconds):
            raise ProtocolError(
                ErrorCode.CACHE_NOT_RESET,
                "running requests hold blocks of the prefix cache: wait for them or cancel them",
            )

    def note_nan(self) -> None:
        """Tokens were made of logits that are no numbers: so may be what they left in the KV cache."""
        self.llm.note_nan()

    @property
    def nan_seen(self) -> bool:
        return self.llm.nan_seen

    async def cache_is_finite(self, timeout_seconds: float) -> bool:
        """Whether there is nothing to clean, however NaN came about: a grammar that allows nothing makes it too."""
        self.llm.nan_seen = False
        answers = await self.call_workers("refitd_cache_is_finite", timeout_seconds=timeout_seconds)
        finite = all(answer["finite"] for answer in answers)
        self.llm.nan_seen |= not finite
        return finite

    async def clean_cache(self, timeout_seconds: float) -> None:
        """Has to be called between two versions, so that NaN of the old weights is not read under the new ones."""
        if self.llm.nan_seen:
            self.llm.nan_seen = False
            try:
                await self.call_workers("refitd_clean_cache", timeout_seconds=timeout_seconds)
            except ProtocolError:
                self.llm.nan_seen = True
                raise

    async def before_sleep(self) -> None:
        """Nothing reads the weights afterwards, neither a call on the direct way nor the copy that is kept of them.

        Raises `refit_failed` where that takes too long.
        """
        await self.call_workers("refitd_before_sleep", timeout_seconds=self._config.refit.deadline_seconds)

    async def sleep(self, level: int) -> None:
        """Raises `engine_dead`: vLLM stops its scheduler first, and nobody knows what of its memory is there then."""
        await self._whole(self.llm.sleep(level=level), "sleep")

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Raises `engine_error` where there is too little device memory: it may be asked again. Else as `sleep`."""
        asked = None if tags is None else list(tags)
        await self.call_workers("refitd_require_room", asked, timeout_seconds=self._config.refit.deadline_seconds)
        await self._whole(self.llm.wake_up(tags=asked), "wake up")

    async def _whole(self, work: Awaitable[Any], what: str) -> None:
        """For what leaves half an engine where it fails."""
        try:
            await self._answer(work, what, self._config.refit.deadline_seconds)
        except ProtocolError:
            raise
        # vLLM hands on what its workers raised as a plain Exception with their words.
        except Exception as error:
            dead = ProtocolError(ErrorCode.ENGINE_DEAD, f"the engine could not {what}: {error}")
            self.on_death(dead)
            raise dead from error

    def stop(self) -> None:
        """Ends the engine's processes at once; in-flight requests must have been ended before."""
        self.on_death = lambda _error: None
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if self._llm is not None:
            self._llm.shutdown(timeout=0)
            self._llm = None
        self._loader.shutdown(wait=False)
