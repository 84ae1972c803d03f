"""What refitd needs of vLLM, and the differences between its releases, in one place. Imported only when an engine
starts.

`StampedLLM` is an AsyncLLM whose output loop we own: steps of our own requests go straight to the daemon as arrays,
without
an object and a task wake-up per stream; requests of vLLM's own server app take vLLM's usual way. Owning the loop also
gives
an exact border between two versions: `drain_outputs` returns only when every token made before it was handed on.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any

import msgspec
import vllm
import vllm.exceptions
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import IterationStats

from refit_protocol.messages import ModelInfo, Sampling, StructuredOutputs
from refitd.engine import Adapter

VLLM_VERSION: str = vllm.__version__
# From 0.30 on vLLM's refusals of a request are no ValueErrors any more.
REFUSALS: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    getattr(vllm.exceptions, "VLLMClientError", vllm.exceptions.VLLMValidationError),
)
StepSink = Callable[[list[EngineCoreOutput]], None]

__all__ = [
    "REFUSALS",
    "VLLM_VERSION",
    "AsyncEngineArgs",
    "EngineDeadError",
    "IncrementalDetokenizer",
    "StampedLLM",
    "engine_argument_names",
    "vllm_sampling_params",
]


def vllm_sampling_params(sampling: Sampling, *, max_tokens: int, stop_token_ids: list[int]) -> SamplingParams:
    """One output's parameters, without its seed; vLLM refuses bad values with a ValueError that names the field."""
    return SamplingParams(
        n=1,
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=sampling.stop or None,
        stop_token_ids=stop_token_ids or None,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        ignore_eos=sampling.ignore_eos,
        bad_words=sampling.bad_words or None,
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=sampling.allowed_token_ids,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        structured_outputs=None if sampling.structured is None else _structured_outputs(sampling.structured),
        skip_special_tokens=sampling.skip_special_tokens,
        detokenize=sampling.text or bool(sampling.stop),
        output_kind=RequestOutputKind.DELTA,
    )


def _structured_outputs(structured: StructuredOutputs) -> StructuredOutputsParams:
    asked = {name: value for name, value in msgspec.structs.asdict(structured).items() if value not in (None, False)}
    return StructuredOutputsParams(**asked)


def engine_argument_names() -> frozenset[str]:
    return frozenset(field.name for field in fields(AsyncEngineArgs))


class _Marker:
    """Put into the output queue behind everything the engine has already sent."""

    def __init__(self) -> None:
        self.reached = asyncio.get_running_loop().create_future()


class StampedLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is not checked
    """Constructed in a thread (the load blocks), used from one event loop afterwards: call `attach` there first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ours: set[str] = set()
        self.nan_seen = False
        self.on_nan: Callable[[], None] = lambda: None
        self.requests_added = 0
        self.before_add: Callable[[], None] = lambda: None
        self.output_handler: asyncio.Task[None] | None
        self._sink: StepSink = lambda _outputs: None
        self._on_death: Callable[[BaseException], None] = lambda _error: None
        super().__init__(*args, **kwargs)

    async def attach(self, sink: StepSink, on_death: Callable[[BaseException], None]) -> None:
        """Starts the output loop: `sink` gets each engine step's outputs of our requests, synchronously."""
        self._sink = sink
        self._on_death = on_death
        lock_input_socket(self.engine_core)
        self._count_requests()
        self._tasks = await self.get_supported_tasks()
        self._run_output_handler()

    def note_nan(self) -> None:
        """See `Engine.note_nan`; vLLM's own app notices it by itself."""
        self.nan_seen = True
        self.on_nan()

    @property
    def has_replicas(self) -> bool:
        """Data parallel: an engine then may step although it has no request."""
        return bool(self.vllm_config.parallel_config.data_parallel_size > 1)

    def _count_requests(self) -> None:
        """Ours and those of vLLM's app alike."""
        add = self.engine_core.add_request_async

        async def counted(request: EngineCoreRequest) -> None:
            self.before_add()
            self.requests_added += 1
            await add(request)

        self.engine_core.add_request_async = counted

    def prepare(
        self, token_ids: list[int], params: SamplingParams, *, priority: int, adapter: Adapter | None
    ) -> EngineCoreRequest:
        """Validates with vLLM's own input processor; the request has no id of its own yet: see `numbered`."""
        return self.input_processor.process_inputs(
            "prepared",
            {"type": "token", "prompt_token_ids": token_ids},
            params,
            supported_tasks=self._tasks,
            priority=priority,
            lora_request=None if adapter is None else lora_request(adapter),
        )

    async def call_workers(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """One answer per worker of every data-parallel replica; vLLM's `collective_rpc` returns the first one's."""
        client = self.engine_core
        calls = [
            client._call_utility_async("collective_rpc", method, None, args, None, engine=engine)
            for engine in client.core_engines
        ]
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    async def submit(self, request: EngineCoreRequest) -> None:
        """Its steps come to the sink from now on."""
        self._ours.add(request.request_id)
        await self.engine_core.add_request_async(request)

    async def withdraw(self, request_ids: list[str]) -> None:
        """No output of these requests reaches the sink any more."""
        self._ours.difference_update(request_ids)
        await self.engine_core.abort_requests_async(request_ids)

    async def freeze(self, *, clear_cache: bool) -> None:
        """Stops the scheduler between steps; running requests stay. Their tokens so far have reached the sink on
        return.

        Not `pause_generation`: that one adds a fixed sleep to order what `drain_outputs` orders exactly.
        """
        await self.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
        await self.drain_outputs()

    async def thaw(self) -> None:
        await self.engine_core.resume_scheduler_async()

    async def drain_outputs(self) -> None:
        """Utility replies and outputs come through one FIFO: what lies before the marker was made before this call."""
        marker = _Marker()
        self.engine_core.outputs_queue.put_nowait(marker)
        await marker.reached

    def _run_output_handler(self) -> None:
        # vLLM calls this whenever a request is added; the loop is ours to start, in `attach`.
        if self.output_handler is None and hasattr(self, "_tasks"):
            self._logger_ref = [self.logger_manager]
            self.output_handler = asyncio.create_task(self._pump_outputs(), name="engine-outputs")

    async def _pump_outputs(self) -> None:
        try:
            while True:
                outputs = await self.engine_core.get_output_async()
                if isinstance(outputs, _Marker):
                    outputs.reached.set_result(None)
                else:
                    await self._hand_on(outputs)
        # The boundary of the engine's output task: whatever ended it ends every request.
        except Exception as error:  # noqa: BLE001
            self.output_processor.propagate_error(error)
            self._on_death(error)

    async def _hand_on(self, outputs: Any) -> None:
        ours, foreign = self._split(outputs.outputs)
        stats = IterationStats() if self.log_stats and outputs.outputs else None
        if ours:
            self._sink(ours)
        if foreign:
            await self._hand_on_foreign(foreign, outputs.timestamp, stats)
        if stats is not None:
            stats.num_generation_tokens += sum(len(output.new_token_ids) for output in ours)
        self.output_processor.update_scheduler_stats(outputs.scheduler_stats)
        if self._logger_ref[0]:
            self._logger_ref[0].record(
                engine_idx=outputs.engine_index, scheduler_stats=outputs.scheduler_stats, iteration_stats=stats
            )

    def _split(self, outputs: list[EngineCoreOutput]) -> tuple[list[EngineCoreOutput], list[EngineCoreOutput]]:
        ours = [output for output in outputs if output.request_id in self._ours]
        if len(ours) == len(outputs):
            foreign = []
        else:
            foreign = [output for output in outputs if output.request_id not in self._ours]
        self._ours.difference_update(output.request_id for output in ours if output.finish_reason is not None)
        return ours, foreign

    async def _hand_on_foreign(self, outputs: list[EngineCoreOutput], timestamp: float, stats: Any) -> None:
        processed = self.output_processor.process_outputs(outputs, timestamp, stats)
        if processed.reqs_to_abort:
            await self.engine_core.abort_requests_async(processed.reqs_to_abort)


def lock_input_socket(client: Any) -> None:
    """Serialises encode-plus-send on the engine's input socket, and names any thread that is not the owner.

    Two threads on that socket interleave frames and kill the engine without a sign in its health check.
    """
    owner = threading.get_ident()
    lock = threading.RLock()  # _send_input calls _send_input_message

    def guarded(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        def locked(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            assert threading.get_ident() == owner, (
                f"thread {threading.current_thread().name!r} used the engine's input socket; post to the event loop"
            )
            with lock:
                return send(*args, **kwargs)

        return locked

    client._send_input = guarded(client._send_input)
    client._send_input_message = guarded(client._send_input_message)


def lora_request(adapter: Adapter) -> LoRARequest:
    """Its name and path are part of the prefix cache's keys, so no adapter finds KV that another one made."""
    return LoRARequest(adapter.name, adapter.id, str(adapter.directory))


def model_info(llm: AsyncLLM, name: str, path: str) -> ModelInfo:
    model = llm.model_config
    return ModelInfo(
        name=name,
        vocab_size=int(model.get_vocab_size()),
        max_model_len=int(model.max_model_len),
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=_eos_token_ids(llm),
        path=path,
    )


def _eos_token_ids(llm: AsyncLLM) -> list[int]:
    """The model's whole EOS set: generation_config.json may name more ids than the tokenizer's one."""
    named = llm.model_config.try_get_generation_config().get("eos_token_id")
    ids = set(named if isinstance(named, list) else [] if named is None else [named])
    from_config = getattr(llm.model_config.hf_text_config, "eos_token_id", None)
    ids.update(from_config if isinstance(from_config, list) else [] if from_config is None else [from_config])
    if llm.tokenizer is not None and llm.tokenizer.eos_token_id is not None:
        ids.add(llm.tokenizer.eos_token_id)
    return sorted(int(token) for token in ids)


def with_prompt(prepared: EngineCoreRequest, token_ids: list[int]) -> EngineCoreRequest:
    """The same of another prompt, which has to be a valid one."""
    request = copy.copy(prepared)
    request.prompt_token_ids = token_ids
    request.arrival_time = time.time()
    return request


def numbered(prepared: EngineCoreRequest, request_id: str, *, seed: int | None, cache_salt: str) -> EngineCoreRequest:
    """One of the outputs that are sampled from the same prompt."""
    request = copy.copy(prepared)
    request.request_id = request_id
    request.cache_salt = cache_salt
    request.sampling_params = copy.copy(prepared.sampling_params)
    request.sampling_params.seed = seed
    return request


def detokenizer(llm: AsyncLLM, request: EngineCoreRequest) -> IncrementalDetokenizer | None:
    if not request.sampling_params.detokenize:
        return None
    return IncrementalDetokenizer.from_new_request(llm.tokenizer, request)


def returns_routed_experts(llm: AsyncLLM) -> bool:
    """The setting moved from the model's configuration to one of its own in 0.32."""
    own = getattr(llm.vllm_config, "aux_output_config", llm.model_config)
    return bool(getattr(own, "enable_return_routed_experts", False))
