"""The sampled figures: interval, get, clear, bounded memory, stop. Samples are awaited, not slept for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from refitd.sampler import LoggerMetricsSampler, read_vllm_figures


class Source:
    """Counts its reads and lets a test wait for the n-th one to be done."""

    def __init__(self) -> None:
        self.reads = 0
        self._changed = asyncio.Condition()

    async def read(self) -> dict[str, float]:
        async with self._changed:
            self.reads += 1
            self._changed.notify_all()
            return {"inflight_batch_sizes": float(self.reads)}

    async def wait_for(self, reads: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.reads >= reads)


def sampled(max_samples: int, scenario: Callable[[Source, LoggerMetricsSampler], Awaitable[None]]) -> None:
    async def run() -> None:
        source = Source()
        sampler = LoggerMetricsSampler(0.001, source.read, max_samples)
        sampler.start()
        try:
            await asyncio.wait_for(scenario(source, sampler), timeout=30)
        finally:
            await sampler.stop()

    asyncio.run(run())


def test_get_returns_every_sample_in_order() -> None:
    """Oldest first, nothing lost between two reads of the list."""

    async def scenario(source: Source, sampler: LoggerMetricsSampler) -> None:
        await source.wait_for(6)
        samples = sampler.get()["inflight_batch_sizes"]
        assert samples[:5] == [1, 2, 3, 4, 5]

    sampled(1000, scenario)


def test_clear_forgets_and_goes_on() -> None:
    """After a clear only newer samples come."""

    async def scenario(source: Source, sampler: LoggerMetricsSampler) -> None:
        await source.wait_for(4)
        sampler.clear()
        assert sampler.get() == {}
        await source.wait_for(source.reads + 3)
        assert sampler.get()["inflight_batch_sizes"][0] >= 4

    sampled(1000, scenario)


def test_memory_is_bounded() -> None:
    """A trainer that never asks costs no more than `max_samples`: the oldest go."""

    async def scenario(source: Source, sampler: LoggerMetricsSampler) -> None:
        await source.wait_for(20)
        samples = sampler.get()["inflight_batch_sizes"]
        assert len(samples) == 5
        assert samples == sorted(samples)
        assert samples[0] >= 14

    sampled(5, scenario)


def test_stop_ends_the_reads_even_a_hanging_one() -> None:
    """A figure that never comes, from a dead engine, does not hold the shutdown up; what was sampled stays."""

    async def run() -> None:
        hanging = asyncio.Event()
        reads = 0

        async def read() -> dict[str, float]:
            nonlocal reads
            reads += 1
            if reads == 2:
                hanging.set()
                await asyncio.Event().wait()
            return {"generation_tokens": 1.0}

        sampler = LoggerMetricsSampler(0.001, read, 10)
        sampler.start()
        await hanging.wait()
        await asyncio.wait_for(sampler.stop(), timeout=30)
        await sampler.stop()
        assert sampler.get() == {"generation_tokens": [1.0]}

    asyncio.run(run())


def test_a_failing_read_does_not_end_the_sampling() -> None:
    """One failure costs one sample."""

    async def run() -> None:
        enough = asyncio.Event()
        reads = 0

        async def read() -> dict[str, float]:
            nonlocal reads
            reads += 1
            if reads == 2:
                raise RuntimeError("the engine is restarting")
            if reads > 3:
                enough.set()
            return {"inflight_batch_sizes": float(reads)}

        sampler = LoggerMetricsSampler(0.001, read, 10)
        sampler.start()
        await asyncio.wait_for(enough.wait(), timeout=30)
        await sampler.stop()
        assert sampler.get()["inflight_batch_sizes"][:2] == [1, 3]

    asyncio.run(run())


def test_lists_are_of_one_length() -> None:
    """A figure that appears later is NaN in the samples before it, so that columns stay aligned."""

    async def run() -> None:
        third = asyncio.Event()
        reads = 0

        async def read() -> dict[str, float]:
            nonlocal reads
            reads += 1
            if reads == 3:
                third.set()
            return {"a": 1.0} if reads == 1 else {"a": 2.0, "b": 3.0}

        sampler = LoggerMetricsSampler(0.001, read, 1000)
        sampler.start()
        await asyncio.wait_for(third.wait(), timeout=30)
        await sampler.stop()
        samples = sampler.get()
        assert samples["a"][:2] == [1.0, 2.0]
        assert len(samples["a"]) == len(samples["b"])
        assert math.isnan(samples["b"][0])
        assert samples["b"][1] == 3.0

    asyncio.run(run())


def test_vllm_figures_are_found_by_name_and_summed() -> None:
    """The figures come out of vLLM's own registry under the trainer's names, over all engines; others stay out."""
    registry = CollectorRegistry()
    running = Gauge("vllm:num_requests_running", "running", ["engine"], registry=registry)
    running.labels("0").set(3)
    running.labels("1").set(4)
    Counter("vllm:generation_tokens", "tokens", ["engine"], registry=registry).labels("0").inc(100)
    Gauge("vllm:something_else", "else", registry=registry).set(1)
    assert asyncio.run(read_vllm_figures(registry)) == {"inflight_batch_sizes": 7, "generation_tokens": 100}


def test_no_engine_no_figures() -> None:
    """Before the model is loaded there is nothing to read, which is no error."""
    assert asyncio.run(read_vllm_figures(CollectorRegistry())) == {}
