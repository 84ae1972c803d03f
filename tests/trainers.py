"""Trainer processes that die, stall or fail at a chosen tensor of a refit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from refit_trainer import Daemon, DType, TensorShape
from tests.worker.models import random_model

SMALL_BUCKET_BYTES = 64 << 10


def tensors_of(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in random_model("qwen3", seed=seed).named_parameters():
        yield name, parameter.detach()


def specs_of() -> list[TensorShape]:
    """What `tensors_of` yields, whatever the seed."""
    return [TensorShape(name=name, dtype=DType.BFLOAT16, shape=tuple(value.shape)) for name, value in tensors_of(0)]


def killing_itself_after(seed: int, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The first `count` tensors of `seed`; asking for one more ends the process."""
    for index, named in enumerate(tensors_of(seed)):
        if index == count:
            os.kill(os.getpid(), signal.SIGKILL)
        yield named


def start_suicidal_trainer(endpoint: str, seed: int, count: int) -> subprocess.Popen[bytes]:
    """A trainer that is killed in the middle of a bucket refit."""
    command = [sys.executable, "-m", "tests.trainers", endpoint, str(seed), str(count)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], stdin=subprocess.DEVNULL)


def main(endpoint: str, seed: str, count: str) -> None:
    with Daemon.connect(endpoint, client="suicidal", bucket_bytes=SMALL_BUCKET_BYTES) as daemon:
        daemon.refit(killing_itself_after(int(seed), int(count)), specs=specs_of())


if __name__ == "__main__":
    main(*sys.argv[1:])
