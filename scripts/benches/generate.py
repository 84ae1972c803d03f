"""Streams through the daemon against the same streams in the engine's own process, and over vLLM's HTTP server.

Three engines stand ready and take turns, round by round: what slows the machine slows all three.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
import uvloop
from scripts.benches.figures import Figure, at_least, at_most
from scripts.benches.generate_peers import SEQUENCES, engine_options, http_peer, in_process_peer, prompt_of
from tests.daemon_process import running_daemon
from tests.tiny_tokenizer import build_tokenizer
from tests.worker.models import build_model

from refit_trainer import AsyncDaemon, Sampling
from refitd.config import EngineConfig

STREAMS, TOKENS = SEQUENCES, 128
ROUNDS = 11
# With heads that CPU and CUDA attention both take.
SHAPE = {"num_hidden_layers": 4, "head_dim": 64}
FIRST_TOKEN_ROUNDS = 200

Seconds = dict[str, float]


@dataclass(frozen=True)
class Way:
    """Has so many streams of so many tokens; `front_ends` are the processes that hand them on, the reader included."""

    run: Callable[[int, int], Seconds]
    front_ends: Sequence[psutil.Process]

    def round(self, streams: int, tokens: int) -> Seconds:
        before = self._cpu_seconds()
        seconds = self.run(streams, tokens)
        return {**seconds, "cpu_seconds": self._cpu_seconds() - before}

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self.front_ends]
        return sum(each.user + each.system for each in times)


def measure() -> Iterator[Figure]:
    """Starts three engines, on the GPU where there is one; about three minutes on two cores."""
    with tempfile.TemporaryDirectory(prefix="refitd-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        model = directory / "model"
        build_model("qwen3", model, seed=0, **SHAPE)
        build_tokenizer(model)
        options = engine_options(on_gpu=torch.cuda.is_available())
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        in_process = stack.enter_context(in_process_peer(model, options))
        http = stack.enter_context(http_peer(model, options))
        process = stack.enter_context(running_daemon(model, directory / "run", *daemon_settings(options)))
        http.wait_healthy()
        in_process.round(1, 1)
        daemon = runner.run(_connected(process.endpoint))
        stack.callback(lambda: runner.run(daemon.close()))
        own = psutil.Process()
        ways = {
            "in-process": Way(in_process.round, _front_ends(in_process.pid)),
            "daemon": Way(
                lambda streams, tokens: runner.run(_daemon_round(daemon, streams, tokens)),
                [own, *_front_ends(process.process.pid)],
            ),
            "http": Way(
                lambda streams, tokens: runner.run(_http_round(http.url, model, streams, tokens)),
                [own, *_front_ends(http.process.pid)],
            ),
        }
        yield from _figures(ways)


def _front_ends(pid: int) -> list[psutil.Process]:
    """That process and its children, but for vLLM's engine, which is the same behind all."""
    root = psutil.Process(pid)
    return [root, *(child for child in root.children(recursive=True) if not _is_engine(child))]


def _is_engine(process: psutil.Process) -> bool:
    """vLLM spawns its engine, and names the process where it can."""
    return process.name().startswith("VLLM::") or "spawn_main" in " ".join(process.cmdline())


def daemon_settings(options: Mapping[str, Any]) -> list[str]:
    """vLLM's options as settings of the daemon: those that it does not know by name go to vLLM as they are."""
    # The scheduler's default, as the other two have it.
    settings = ['engine.scheduling_policy="fcfs"']
    for name, value in options.items():
        section = "engine" if name in EngineConfig.model_fields else "engine.extra"
        settings.append(f"{section}.{name}={_toml(value)}")
    return settings


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def _figures(ways: dict[str, Way]) -> Iterator[Figure]:
    rounds = _interleaved(ways, ROUNDS, STREAMS, TOKENS)
    rates = {name: [STREAMS * TOKENS / seconds["seconds"] for seconds in taken] for name, taken in rounds.items()}
    for name, values in rates.items():
        yield Figure(f"{_figure_name(name)}_tokens_per_second", statistics.median(values), "tokens/s")
    yield from _cpu_figures(rounds)
    daemon = statistics.median(rates["daemon"])
    for figure, peer, limit in (("stream_vs_inprocess", "in-process", 0.97), ("stream_vs_http", "http", 2.0)):
        yield at_least(figure, daemon, "tokens/s", limit, ratio=_ratio(rates["daemon"], rates[peer]))
    # Where all wait for the engine this is what there is to gain over HTTP.
    own, over_http = rates["in-process"], rates["http"]
    yield Figure("inprocess_vs_http", statistics.median(own), "tokens/s", _ratio(own, over_http))
    yield from _first_token_figures(ways)


def _first_token_figures(ways: dict[str, Way]) -> Iterator[Figure]:
    first = _interleaved({name: ways[name] for name in ("in-process", "daemon")}, FIRST_TOKEN_ROUNDS, 1, 1)
    over = [
        daemon_seconds["first_seconds"] - own_seconds["first_seconds"]
        for own_seconds, daemon_seconds in zip(first["in-process"], first["daemon"], strict=True)
    ]
    own = statistics.median(seconds["first_seconds"] for seconds in first["in-process"])
    yield Figure("ttft_inprocess_ms", own * 1e3, "ms")
    yield at_most("ttft_over_inprocess_ms", statistics.median(over) * 1e3, "ms", 1.0)


def _cpu_figures(rounds: dict[str, list[Seconds]]) -> Iterator[Figure]:
    """What each way costs besides the engine: this is what decides where the engine is faster than here."""
    microseconds = {
        name: [seconds["cpu_seconds"] * 1e6 / (STREAMS * TOKENS) for seconds in taken] for name, taken in rounds.items()
    }
    for name, values in microseconds.items():
        ratio = _ratio(values, microseconds["in-process"])
        yield Figure(f"{_figure_name(name)}_cpu_per_token", statistics.median(values), "us", ratio)


def _figure_name(way: str) -> str:
    return way.replace("-", "_")


def _ratio(values: list[float], reference: list[float]) -> float:
    """Of each round by itself: neighbours in time had the same machine."""
    return statistics.median(value / other for value, other in zip(values, reference, strict=True))


def _interleaved(ways: dict[str, Way], rounds: int, streams: int, tokens: int) -> dict[str, list[Seconds]]:
    taken: dict[str, list[Seconds]] = {name: [] for name in ways}
    for way in ways.values():
        way.round(streams, tokens)
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(way.round(streams, tokens))
    return taken


async def _connected(endpoint: str) -> AsyncDaemon:
    return await AsyncDaemon.connect(endpoint, client="bench", timeout_seconds=60.0)


async def _daemon_round(daemon: AsyncDaemon, streams: int, tokens: int) -> Seconds:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    first: list[float] = []
    started = time.perf_counter()

    async def consume(stream: int) -> int:
        count = 0
        async for delta in daemon.stream([prompt_of(stream)], sampling):
            if not count:
                first.append(time.perf_counter() - started)
            count += len(delta.token_ids)
        return count

    counts = await asyncio.gather(*map(consume, range(streams)))
    assert counts == [tokens] * streams
    return {"seconds": time.perf_counter() - started, "first_seconds": min(first)}


async def _http_round(url: str, model: Path, streams: int, tokens: int) -> Seconds:
    body = {
        "model": str(model),
        "max_tokens": tokens,
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
        "return_token_ids": True,
    }
    first: list[float] = []
    started = time.perf_counter()

    async def consume(session: aiohttp.ClientSession, stream: int) -> int:
        count = 0
        async with session.post(f"{url}/v1/completions", json={**body, "prompt": prompt_of(stream)}) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    if not count:
                        first.append(time.perf_counter() - started)
                    count += len(choice["token_ids"] or [])
        return count

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        counts = await asyncio.gather(*(consume(session, stream) for stream in range(streams)))
    assert counts == [tokens] * streams, counts
    return {"seconds": time.perf_counter() - started, "first_seconds": min(first)}
