"""Refits by broadcast over NCCL: the trainer on one GPU, the engine on another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.states import EngineState
from refit_trainer import Daemon, RefitdError
from tests.canary import unharmed
from tests.daemon_process import DaemonProcess
from tests.gpu.conftest import digest_of, load_values, sampled, trainer_model
from tests.gpu.peers import peer

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")

ELSEWHERE = "cuda:1"
ROUNDS = 20
FLAT_AFTER = 3
REJOINS = 8
GROUP_SECONDS = 30.0


@pytest.fixture
def distant_model() -> PreTrainedModel:
    """A trainer's model on the second GPU."""
    return trainer_model(0).to(ELSEWHERE)


@pytest.fixture(autouse=True)
def trainer_device() -> Iterator[None]:
    with torch.cuda.device(ELSEWHERE):
        yield


def test_refits_are_exact_from_a_to_b_and_back(
    gpu_daemon: Daemon, distant_model: PreTrainedModel, fresh: dict[int, tuple[list[int], list[float]]]
) -> None:
    """Greedy ids and logprobs equal, bit for bit, those of daemons just started on the same weights."""
    with gpu_daemon.collective(timeout_seconds=GROUP_SECONDS) as group:
        for seed in (0, 1, 0):
            load_values(distant_model, seed)
            report = group.refit(distant_model)
            assert report.path == "plan"
            assert sampled(gpu_daemon) == fresh[seed]
            assert gpu_daemon.digest("full").digest == digest_of(gpu_daemon, distant_model)


@pytest.mark.parametrize("bucket_bytes", [4096, (1 << 16) + 64, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pieces_of_any_size_give_the_same(gpu_daemon: Daemon, bucket_bytes: int, dtype: torch.dtype) -> None:
    """Also where tensors are larger than a piece, and where the trainer's dtype is cast."""
    model = trainer_model(5, dtype).to(ELSEWHERE)
    with gpu_daemon.collective(bucket_bytes=bucket_bytes, timeout_seconds=GROUP_SECONDS) as group:
        for seed in (5, 6):
            load_values(model, seed)
            group.refit(model)
            expected = trainer_model(seed, dtype).to(torch.bfloat16)
            assert gpu_daemon.digest("full").digest == digest_of(gpu_daemon, expected)


def test_a_refit_sees_what_was_enqueued_and_nothing_that_came_later(
    gpu_daemon: Daemon, distant_model: PreTrainedModel
) -> None:
    """A long kernel, then the new values, no host synchronisation; overwritten as soon as the refit returns."""
    values = [[p.detach().clone() for p in trainer_model(seed).to(ELSEWHERE).parameters()] for seed in (0, 1)]
    expected = [digest_of(gpu_daemon, trainer_model(seed)) for seed in (0, 1)]
    with gpu_daemon.collective(bucket_bytes=1 << 18, timeout_seconds=GROUP_SECONDS) as group:
        for round_ in range(ROUNDS):
            with torch.no_grad():
                torch.cuda._sleep(10_000_000)
                torch._foreach_copy_(list(distant_model.parameters()), values[round_ % 2])
                group.refit(distant_model)
                torch._foreach_copy_(list(distant_model.parameters()), values[1 - round_ % 2])
            assert gpu_daemon.digest("full").digest == expected[round_ % 2]


def test_a_group_on_the_engines_own_gpu_is_refused(gpu_daemon: Daemon) -> None:
    """NCCL wants a GPU for each rank: a clear error in time, and the engine goes on."""
    with unharmed(gpu_daemon), pytest.raises(RefitdError) as refused:
        gpu_daemon.collective(device="cuda:0", timeout_seconds=10)
    assert refused.value.code is ErrorCode.COLLECTIVE_FAILED


def trainer_process(connection: Connection, endpoint: str) -> None:
    """Refits for ever, or says why it cannot."""
    torch.cuda.set_device(ELSEWHERE)
    with Daemon.connect(endpoint, client="peer") as daemon:
        model = trainer_model(1).to(ELSEWHERE)
        with daemon.collective(bucket_bytes=4096, timeout_seconds=GROUP_SECONDS) as group:
            connection.send(group.refit(model).path)
            connection.recv()
            connection.send("refitting")
            while True:
                group.refit(model)


@pytest.mark.parametrize("after_seconds", [0.003, 0.05])
def test_a_killed_trainer_takes_nothing_along(
    gpu_process: DaemonProcess, distant_model: PreTrainedModel, after_seconds: float
) -> None:
    """Killed between and inside broadcasts: the next trainer makes a new group, and its weights are served."""
    with peer(trainer_process, gpu_process.endpoint) as trainer:
        assert trainer.answer() == "plan"
        trainer.ask("go on")
        threading.Event().wait(after_seconds)
        trainer.kill()
    with gpu_process.connect() as daemon:
        daemon.acquire_writer(takeover=True)
        load_values(distant_model, 7)
        with daemon.collective(timeout_seconds=GROUP_SECONDS) as group:
            group.refit(distant_model)
        assert daemon.digest("full").digest == digest_of(daemon, distant_model)
        assert daemon.status().state is EngineState.READY


def test_groups_made_anew_leave_memory_and_descriptors_flat(
    gpu_process: DaemonProcess, distant_model: PreTrainedModel
) -> None:
    """Of trainer and engine, on both GPUs."""
    processes = [psutil.Process(pid) for pid in (os.getpid(), *gpu_process.engine_pids())]

    def usage() -> tuple[int, int]:
        free_bytes = sum(torch.cuda.mem_get_info(device)[0] for device in (0, 1))
        return free_bytes, sum(process.num_fds() for process in processes)

    with gpu_process.connect() as daemon:
        for round_ in range(REJOINS):
            with daemon.collective(timeout_seconds=GROUP_SECONDS) as group:
                group.refit(distant_model)
            torch.cuda.empty_cache()
            daemon.digest()
            if round_ == FLAT_AFTER:
                free_bytes, descriptors = usage()
    # Groups end in the background, and NCCL keeps some memory between them, which must not grow.
    patience = time.monotonic() + GROUP_SECONDS
    while usage()[1] > descriptors and time.monotonic() < patience:
        threading.Event().wait(0.1)
    assert usage()[1] <= descriptors
    assert usage()[0] >= free_bytes - (64 << 20)
