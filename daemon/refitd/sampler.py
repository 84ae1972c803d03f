"""The engine's figures over time, for a trainer's own logger: sampled at an interval until they are asked for."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable

import structlog
from prometheus_client import REGISTRY, CollectorRegistry

# What is sampled from vLLM's own metrics, by the names that trainers' loggers know.
VLLM_FIGURES = {
    "inflight_batch_sizes": "vllm:num_requests_running",
    "num_pending_samples": "vllm:num_requests_waiting",
    "kv_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "generation_tokens": "vllm:generation_tokens_total",
}

_log = structlog.get_logger(__name__)


class LoggerMetricsSampler:
    """Keeps the newest `max_samples` of what `read` returns, one every `interval_seconds` from `start` to `stop`."""

    def __init__(
        self, interval_seconds: float, read: Callable[[], Awaitable[dict[str, float]]], max_samples: int
    ) -> None:
        self.interval_seconds = interval_seconds
        self._read = read
        self._samples: deque[dict[str, float]] = deque(maxlen=max_samples)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._task is None, "the sampler runs already"
        self._task = asyncio.get_running_loop().create_task(self._run(), name="logger-metrics")

    async def stop(self) -> None:
        """What was sampled stays; stopping twice does no harm."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        await asyncio.wait([task])

    def get(self) -> dict[str, list[float]]:
        """One list a figure, oldest first and all of one length; NaN where a figure was not there yet."""
        names = sorted({name for sample in self._samples for name in sample})
        return {name: [sample.get(name, math.nan) for sample in self._samples] for name in names}

    def clear(self) -> None:
        self._samples.clear()

    async def _run(self) -> None:
        while True:
            await self._sample()
            await asyncio.sleep(self.interval_seconds)

    async def _sample(self) -> None:
        try:
            self._samples.append(await self._read())
        except Exception as error:  # noqa: BLE001 - a figure that cannot be read must not end the sampling of the others
            _log.warning("the engine's figures could not be sampled", reason=str(error))


async def read_vllm_figures(registry: CollectorRegistry = REGISTRY) -> dict[str, float]:
    """The figures of `VLLM_FIGURES` that vLLM has by now, summed over its engines; empty before it has loaded."""
    figures: dict[str, float] = {}
    wanted = {name: figure for figure, name in VLLM_FIGURES.items()}
    for family in registry.restricted_registry(list(wanted)).collect():
        for sample in family.samples:
            if (figure := wanted.get(sample.name)) is not None:
                figures[figure] = figures.get(figure, 0.0) + sample.value
    return figures
