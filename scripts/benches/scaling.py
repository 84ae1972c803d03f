"""What of docs/scaling.md can be checked without a second machine: copies and a broadcast that share one memory."""

from __future__ import annotations

import ctypes
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as distributed
from scripts.benches.figures import Figure
from scripts.benches.refit import interleaved

BROADCAST_BYTES = 256 << 20
ROUNDS = 7


def measure() -> Iterator[Figure]:
    """About a minute. On loopback all links are one memory: the model then says, three times the bytes, three times as
    long."""
    source, target = torch.ones(BROADCAST_BYTES, dtype=torch.uint8), torch.zeros(BROADCAST_BYTES, dtype=torch.uint8)
    one = target[: BROADCAST_BYTES // 2]
    seconds = interleaved(
        {
            "all": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes),
            "half": lambda: ctypes.memmove(one.data_ptr(), source.data_ptr(), one.nbytes),
        }
    )
    yield Figure("memcpy_gb_per_second", BROADCAST_BYTES / seconds["all"] / 1e9, "GB/s")
    yield _against("copy_of_half_vs_model", seconds["half"], seconds["all"] / 2)
    to_one, to_three = _broadcast_seconds(2), _broadcast_seconds(4)
    yield Figure("loopback_broadcast_gb_per_second", BROADCAST_BYTES / to_one / 1e9, "GB/s")
    yield _against("broadcast_to_three_vs_model", to_three, 3 * to_one)


def _against(name: str, measured: float, model: float) -> Figure:
    """1 where the model is right."""
    return Figure(name, measured * 1e3, "ms", measured / model)


def _broadcast_seconds(processes: int) -> float:
    """Median of plain gloo broadcasts, as the first rank sees them; all ranks are processes of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "scripts.benches.scaling", str(processes), str(port)]
    root = Path(__file__).resolve().parents[2]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, cwd=root)
        for rank in range(processes)
    ]
    try:
        answers = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return float(answers[0])


def broadcast(processes: int, port: int, rank: int) -> float:
    """One rank of it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    distributed.init_process_group("gloo", rank=rank, world_size=processes)
    data = torch.full((BROADCAST_BYTES,), rank, dtype=torch.uint8)
    seconds = []
    for _ in range(ROUNDS):
        distributed.barrier()
        started = time.perf_counter()
        distributed.broadcast(data, 0)
        distributed.barrier()
        seconds.append(time.perf_counter() - started)
    assert not data.any(), "the first rank's bytes have come"
    distributed.destroy_process_group()
    return statistics.median(seconds)


if __name__ == "__main__":
    print(broadcast(*(int(argument) for argument in sys.argv[1:])))
