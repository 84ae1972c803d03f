"""Refits by broadcast against one plain torch.distributed broadcast of the same bytes to another process.

On CPUs over gloo and the loopback; where there are two GPUs, over NCCL from one to the other.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scripts.benches.figures import Figure, at_least
from scripts.benches.gpu import QWEN3_8B
from scripts.benches.refit import ONE_GIGABYTE, interleaved, unwritten_model
from tests.daemon_process import running_daemon
from tests.gpu.peers import peer
from transformers import Qwen3Config

# Of any one wait: nothing measured here takes a tenth of it.
WAIT_SECONDS = 40.0


@dataclass(frozen=True)
class Case:
    """`trainer` and `receiver` are the devices of the weights and of the plain broadcast's two ends."""

    backend: str
    shape: dict[str, Any]
    engine: tuple[str, ...]
    trainer: str
    receiver: str


ENGINE = ("engine.load_format=dummy", "engine.tokenizer=false")
GPU_ENGINE = (*ENGINE, "engine.dtype=bfloat16", "engine.max_model_len=2048", "engine.gpu_memory_utilization=0.3")
CPU = Case("gloo", ONE_GIGABYTE, ENGINE, "cpu", "cpu")
GPU = Case("nccl", QWEN3_8B, GPU_ENGINE, "cuda:1", "cuda:0")


def measure() -> Iterator[Figure]:
    """Starts an engine; about two minutes on two cores."""
    if torch.cuda.device_count() > 1:
        seconds, total_bytes = _compare(GPU)
        yield from _figures("collective_nccl", seconds, total_bytes)
        yield Figure("collective_nccl_gbps", total_bytes / seconds["collective"] / 1e9, "GB/s")
    else:
        seconds, total_bytes = _compare(CPU)
        yield from _figures("collective", seconds, total_bytes)


def _figures(name: str, seconds: dict[str, float], total_bytes: int) -> Iterator[Figure]:
    ratio = seconds["broadcast"] / seconds["collective"]
    yield Figure(f"{name}_bytes", total_bytes, "bytes")
    yield Figure(f"{name}_plain_broadcast", seconds["broadcast"] * 1e3, "ms")
    yield at_least(f"{name}_vs_broadcast", seconds["collective"] * 1e3, "ms", 0.8, ratio=ratio)
    yield Figure(f"{name}_unattested", seconds["unattested"] * 1e3, "ms")


def _compare(case: Case) -> tuple[dict[str, float], int]:
    """Median seconds of each way, and the bytes of the weights."""
    with tempfile.TemporaryDirectory(prefix="refitd-bench-") as name:
        directory = Path(name)
        config = Qwen3Config(**{"architectures": ["Qwen3ForCausalLM"], **case.shape})
        config.save_pretrained(directory / "model")
        if case.trainer != "cpu":
            torch.cuda.set_device(case.trainer)
        model = unwritten_model(config, case.trainer)
        total_bytes = sum(parameter.nbytes for parameter in model.parameters())
        with (
            running_daemon(directory / "model", directory / "run", *case.engine) as process,
            process.connect() as daemon,
            daemon.collective(device=case.trainer, timeout_seconds=WAIT_SECONDS) as group,
            _plain_broadcast(case, total_bytes) as broadcast,
        ):
            ways: dict[str, Callable[[], object]] = {
                "broadcast": broadcast,
                "collective": lambda: group.refit(model),
                "unattested": lambda: group.refit(model, attest="off"),
            }
            return interleaved(ways), total_bytes


@contextmanager
def _plain_broadcast(case: Case, size_bytes: int) -> Iterator[Callable[[], None]]:
    """One broadcast between two processes, from the call until the receiver has all of it.

    Both are processes of their own, killed at the end: no group has to be taken down in step.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        peer(_broadcasts, case.backend, case.trainer, 0, port, size_bytes) as sender,
        peer(_broadcasts, case.backend, case.receiver, 1, port, size_bytes) as receiver,
    ):
        for end in (sender, receiver):
            end.answer(WAIT_SECONDS)

        def broadcast() -> None:
            for end in (sender, receiver):
                end.tell("go")
            for end in (receiver, sender):
                end.answer(WAIT_SECONDS)

        try:
            yield broadcast
        finally:
            sender.kill()
            receiver.kill()


def _broadcasts(orders: Connection, backend: str, device: str, rank: int, port: int, size_bytes: int) -> None:
    """One end, which waits for each order on the host: NCCL's kernels never rest, and the engine's device is shared."""
    if device != "cpu":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=WAIT_SECONDS)
    dist.init_process_group(backend, timeout=timeout, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    data = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    orders.send("ready")
    while True:
        orders.recv()
        dist.broadcast(data, 0)
        if device != "cpu":
            torch.cuda.synchronize(device)
        orders.send("done")
