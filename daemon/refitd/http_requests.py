"""The HTTP requests inside of the engine: through the gate, salted and stamped with the version, out when told."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.adapters import AdapterUses
from refitd.compat_grammar import check_grammar
from refitd.engine import StepOutput
from refitd.gate import Gate
from refitd.http_call import HttpCall, current_call
from refitd.http_trace import Trace

if TYPE_CHECKING:
    from refitd.compat import StampedLLM

# Where a request that is being added belongs; never set for the daemon's own requests.
_adding: ContextVar[tuple[Trace, int] | None] = ContextVar("refitd_http_adding", default=None)


@dataclass(frozen=True)
class _Sequence:
    trace: Trace
    choice: int
    request: Any


class HttpRequests:
    """The app's requests inside of the engine: through the gate, salted and stamped with the version, out when told."""

    def __init__(self, llm: StampedLLM, gate: Gate, adapters: AdapterUses) -> None:
        self._llm = llm
        self._adapters = adapters
        self._gate = gate
        self._running: dict[str, _Sequence] = {}
        self._add = llm.engine_core.add_request_async
        self._process = llm.output_processor.process_outputs
        llm.engine_core.add_request_async = self._add_salted
        llm.output_processor.process_outputs = self._process_stamped
        gate.on_publish.append(self._readmit_unstarted)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        """vLLM's `generate`; the call itself takes the choices, so they are numbered in the order of the prompts."""
        call = current_call.get()
        assert call is not None, "vLLM generated outside of a request"
        call.require_exact()
        check_grammar(sampling_params.structured_outputs)
        first = call.trace.reserve(sampling_params.n)
        return self._generate(call, first, prompt, sampling_params, request_id, options)

    async def _generate(
        self, call: HttpCall, first: int, prompt: Any, sampling_params: Any, request_id: str, options: Mapping[str, Any]
    ) -> AsyncIterator[Any]:
        lora = options.get("lora_request")
        with self._adapters.held(None if lora is None else lora.lora_int_id):
            await self._gate.admit(call.min_version, call.wait_seconds)
            self._gate.enter()
            _adding.set((call.trace, first))
            try:
                async with aclosing(self._llm.generate(prompt, sampling_params, request_id, **options)) as outputs:
                    async for output in outputs:
                        if call.trace.failure is not None:
                            raise call.trace.failure
                        yield output
            finally:
                self._forget(call.trace, range(first, first + sampling_params.n))
                self._gate.leave()

    async def abort_all(self, error: ErrorCode) -> None:
        """What was only `aborted` ends with what it has: OpenAI's `finish_reason` has a word of its own for that."""
        running = dict(self._running)
        if error is not ErrorCode.ABORTED:
            for sequence in running.values():
                sequence.trace.failure = ProtocolError(error, "the request was ended before it was complete")
        if running:
            await self._llm.abort(list(running), internal=True)

    # --- between the app and the engine -------------------------------------------------------------------------------

    async def _add_salted(self, request: Any) -> None:
        """Every request of the app passes here last; the daemon's own ones have no trace in their context."""
        adding = _adding.get()
        if adding is not None:
            trace, first = adding
            index = self._llm.output_processor.request_states[request.request_id].request_index
            request.cache_salt = _salt(self._gate.version, request.cache_salt)
            self._running[request.request_id] = _Sequence(trace, first + index, request)
        await self._add(request)

    def _process_stamped(self, outputs: list[StepOutput], *args: Any, **kwargs: Any) -> Any:
        """Runs in the output loop: no token of one version is here once the next one is published."""
        for output in outputs:
            sequence = self._running.get(output.request_id)
            if sequence is not None:
                sequence.trace.made(sequence.choice, len(output.new_token_ids), self._gate.version)
                if _is_nan(output):
                    self._llm.note_nan()
                    sequence.trace.failure = ProtocolError(
                        ErrorCode.NOT_A_NUMBER, "the model's logprobs are not numbers"
                    )
        return self._process(outputs, *args, **kwargs)

    async def _readmit_unstarted(self, version: int) -> None:
        """Between freeze and thaw: what has no token yet starts afresh, so that it finds no KV of the old weights."""
        unstarted = {
            key: sequence for key, sequence in self._running.items() if sequence.choice not in sequence.trace.spans
        }
        if not unstarted:
            return
        await self._llm.engine_core.abort_requests_async(list(unstarted))
        for sequence in unstarted.values():
            sequence.request.cache_salt = _salt(version, _own_salt(sequence.request.cache_salt))
            await self._add(sequence.request)

    def _forget(self, trace: Trace, choices: range) -> None:
        ended = [key for key, running in self._running.items() if running.trace is trace and running.choice in choices]
        for key in ended:
            del self._running[key]


def _salt(version: int, own: str | None) -> str:
    return f"refitd-{version}" if own is None else f"refitd-{version}-{own}"


def _own_salt(salt: str | None) -> str | None:
    return None if salt is None or salt.count("-") < 2 else salt.split("-", 2)[2]


def _is_nan(output: StepOutput) -> bool:
    rows = output.new_logprobs
    return rows is not None and any(
        math.isnan(value) for value in rows.logprobs[: len(output.new_token_ids), 0].tolist()
    )
