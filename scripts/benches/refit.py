"""Refits of a 1 GB model through shared memory, against one plain memcpy of the same bytes in the same run."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from scripts.benches.figures import Figure, at_most
from tests.daemon_process import DaemonProcess, running_daemon
from tests.worker.models import build_model, random_model
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from refit_trainer import Daemon, share_parameters

ROUNDS = 15
MANY_REFITS = 1000
FLAT_AFTER = 10
RSS_NOISE_BYTES = 8 << 20
ONE_GIGABYTE = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def measure() -> Iterator[Figure]:
    """Starts two engines, one after the other; about five minutes on two cores."""
    with tempfile.TemporaryDirectory(prefix="refitd-bench-") as name:
        directory = Path(name)
        yield from _speed(directory)
        yield from _flatness(directory)


def _speed(directory: Path) -> Iterator[Figure]:
    config = Qwen3Config(**ONE_GIGABYTE, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(directory / "large")
    model = unwritten_model(config)
    options = ("engine.load_format=dummy", "engine.tokenizer=false")
    with running_daemon(directory / "large", directory / "run-large", *options) as process, process.connect() as daemon:
        share_parameters(model)
        total_bytes = sum(parameter.nbytes for parameter in model.parameters())
        source = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
        target = torch.empty_like(source)
        tensors = dict(model.named_parameters())
        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes),
            "inplace": lambda: daemon.refit(model),
            "bucket": lambda: daemon.refit(iter(tensors.items())),
        }
        seconds = interleaved(ways)
        report = daemon.refit(model)
    memcpy = seconds["memcpy"]
    yield Figure("memcpy", memcpy * 1e3, "ms")
    yield Figure("refit_bytes", total_bytes, "bytes")
    yield at_most("inplace_vs_memcpy", seconds["inplace"] * 1e3, "ms", 1.3, ratio=seconds["inplace"] / memcpy)
    yield at_most("bucket_vs_memcpy", seconds["bucket"] * 1e3, "ms", 2.3, ratio=seconds["bucket"] / memcpy)
    for phase in ("validate", "gate", "copy", "attest", "publish", "total"):
        yield Figure(f"inplace_{phase}", getattr(report.milliseconds, phase), "ms")


def _flatness(directory: Path) -> Iterator[Figure]:
    build_model("qwen3", directory / "small", seed=0)
    model = share_parameters(random_model("qwen3", seed=0))
    with (
        running_daemon(directory / "small", directory / "run-small", "engine.tokenizer=false") as process,
        process.connect() as daemon,
    ):
        _refit_both_ways(daemon, model, FLAT_AFTER)
        before = _usage(process)
        _refit_both_ways(daemon, model, MANY_REFITS - FLAT_AFTER)
        after = _usage(process)
    yield at_most("refits_1000_rss_growth_bytes", after[0] - before[0], "bytes", RSS_NOISE_BYTES)
    yield at_most("refits_1000_fd_growth", after[1] - before[1], "descriptors", 0)


def _refit_both_ways(daemon: Daemon, model: PreTrainedModel, times: int) -> None:
    for index in range(times):
        daemon.refit(model if index % 2 else iter(dict(model.named_parameters()).items()))


def _usage(process: DaemonProcess) -> tuple[int, int]:
    """Resident bytes and open descriptors of trainer, daemon and engine together."""
    gc.collect()
    pids = [os.getpid(), process.process.pid, *process.engine_pids()]
    processes = [psutil.Process(pid) for pid in pids]
    return sum(p.memory_info().rss for p in processes), sum(p.num_fds() for p in processes)


def unwritten_model(config: Qwen3Config, device: str = "cpu") -> PreTrainedModel:
    """Skips transformers' initialisation, which takes longer than everything measured here."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model


def interleaved(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each way; one round of all after another, so that noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
        way()
    for _ in range(ROUNDS):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}
