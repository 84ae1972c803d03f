"""Refits by broadcast against one plain torch.distributed broadcast of the same bytes to another process.

On CPUs over gloo and the loopback; where there are two GPUs, over NCCL from one to the other.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scripts.benches.figures import Figure, at_least
from scripts.benches.gpu import ENGINE, QWEN3_8B
from scripts.benches.refit import ONE_GIGABYTE, interleaved, unwritten_model
from tests.daemon_process import running_daemon
from transformers import Qwen3Config

GO = 1
STOP = 0


@dataclass(frozen=True)
class Case:
    """`trainer` and `receiver` are the devices of the trainer's weights and of the plain broadcast's other end."""

    backend: str
    shape: dict[str, Any]
    engine: tuple[str, ...]
    trainer: str
    receiver: str


CPU = Case("gloo", ONE_GIGABYTE, ("engine.load_format=dummy", "engine.tokenizer=false"), "cpu", "cpu")
GPU = Case("nccl", QWEN3_8B, ENGINE, "cuda:1", "cuda:0")


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
        model = unwritten_model(config).to(case.trainer)
        flat = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
        with (
            running_daemon(directory / "model", directory / "run", *case.engine) as process,
            process.connect() as daemon,
            daemon.collective(device=case.trainer) as group,
            _plain_broadcast(case, flat) as broadcast,
        ):
            ways: dict[str, Callable[[], object]] = {
                "broadcast": broadcast,
                "collective": lambda: group.refit(model),
                "unattested": lambda: group.refit(model, attest="off"),
            }
            return interleaved(ways), flat.nbytes


@contextmanager
def _plain_broadcast(case: Case, flat: torch.Tensor) -> Iterator[Callable[[], None]]:
    """One broadcast to a process of its own, from the call until that process has all of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spawning = multiprocessing.get_context("spawn")
    orders, heard = spawning.Pipe()
    receiver = spawning.Process(target=_receive, args=(case, port, flat.nbytes, heard), daemon=True)
    receiver.start()
    dist.init_process_group(case.backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
    done = torch.zeros(1, device=case.trainer)

    def broadcast() -> None:
        # Not by a broadcast: NCCL's would wait on the engine's own device, in a kernel that never rests.
        orders.send(GO)
        dist.broadcast(flat.view(torch.uint8), 0)
        dist.broadcast(done, 1)
        _synchronise(case.trainer)

    try:
        yield broadcast
    finally:
        orders.send(STOP)
        receiver.join()
        dist.destroy_process_group()


def _receive(case: Case, port: int, size_bytes: int, orders: Connection) -> None:
    if case.receiver != "cpu":
        torch.cuda.set_device(case.receiver)
    dist.init_process_group(case.backend, init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    target = torch.empty(size_bytes, dtype=torch.uint8, device=case.receiver)
    done = torch.zeros(1, device=case.receiver)
    while orders.recv() != STOP:
        dist.broadcast(target, 0)
        dist.broadcast(done, 1)
    dist.destroy_process_group()


def _synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
