"""Engines of other kinds: CUDA graphs, sleep that frees memory, fp8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_trainer import Daemon, RefitdError
from tests.daemon_process import DaemonProcess
from tests.gpu.conftest import SETTINGS, digest_of, load_values, running_daemons, sampled
from tests.gpu.test_standing_refits import stands_by, until_it_stands_by

SLEEPY_CACHE_BYTES = 16 << 30
GRAPHS = (*SETTINGS, "engine.enforce_eager=false", "engine.max_num_seqs=8")
SLEEPY = (
    *SETTINGS,
    "engine.enable_sleep_mode=true",
    # All of the table: the number of blocks that other tests' engines are bound to would win.
    f"engine.extra={{kv_cache_memory_bytes = {SLEEPY_CACHE_BYTES}}}",
)
FP8 = (*SETTINGS, 'engine.extra.quantization="fp8"')


@pytest.fixture(scope="module")
def engines(checkpoints: dict[int, Path], short_directory: Path) -> Iterator[dict[str, DaemonProcess]]:
    """One daemon of each kind; of fp8 one on each checkpoint."""
    wanted = {
        "graphs": (checkpoints[0], GRAPHS),
        "sleepy": (checkpoints[0], SLEEPY),
        "fp8-0": (checkpoints[0], FP8),
        "fp8-1": (checkpoints[1], FP8),
    }
    with running_daemons(short_directory, wanted) as processes:
        yield processes


@pytest.fixture
def sleepy(engines: dict[str, DaemonProcess]) -> Iterator[Daemon]:
    """Awake again afterwards."""
    with engines["sleepy"].connect() as daemon:
        yield daemon
        torch.cuda.empty_cache()
        daemon.wake_up()


def test_cuda_graphs_see_every_refit(
    engines: dict[str, DaemonProcess], fresh: dict[int, tuple[list[int], list[float]]], gpu_model: PreTrainedModel
) -> None:
    """After five refits a compiled engine with graphs gives the greedy ids of a fresh eager one."""
    with engines["graphs"].connect() as graphs:
        for seed in (1, 0, 1, 0, 1):
            load_values(gpu_model, seed)
            graphs.refit(gpu_model)
            assert sampled(graphs)[0] == fresh[seed][0]
        assert graphs.digest("full").digest == digest_of(graphs, gpu_model)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_to_the_trainer_and_a_refit_ends_it(
    sleepy: Daemon, gpu_model: PreTrainedModel, level: int
) -> None:
    """Asleep, the engine's memory is the trainer's; wake the weights, refit, wake the cache, and all is exact."""
    sleepy.refit(gpu_model)
    before = sampled(sleepy)
    torch.cuda.empty_cache()
    awake_free = torch.cuda.mem_get_info()[0]
    sleepy.sleep(level)
    freed = torch.cuda.mem_get_info()[0] - awake_free
    assert freed >= SLEEPY_CACHE_BYTES
    with pytest.raises(RefitdError) as refused:
        sampled(sleepy)
    assert refused.value.code is ErrorCode.ASLEEP
    with pytest.raises(RefitdError) as refused:
        sleepy.refit(gpu_model)
    assert refused.value.code is ErrorCode.NOT_ALLOWED_NOW
    held = torch.empty(freed - (1 << 30), dtype=torch.uint8, device="cuda").fill_(1)
    del held
    torch.cuda.empty_cache()
    sleepy.wake_up(["weights"])
    load_values(gpu_model, 1)
    load_values(gpu_model, 0)
    sleepy.refit(gpu_model)
    sleepy.wake_up(["kv_cache"])
    assert sampled(sleepy) == before
    assert sleepy.digest("full").digest == digest_of(sleepy, gpu_model)


def test_a_refit_that_stands_by_gives_way_to_sleep(
    engines: dict[str, DaemonProcess], gpu_model: PreTrainedModel
) -> None:
    """And stands by again when the engine has woken and been refitted."""
    with engines["sleepy"].connect(stand_by=True) as daemon:
        daemon.refit(gpu_model)
        before = sampled(daemon)
        for level in (1, 2):
            until_it_stands_by(daemon, gpu_model)
            daemon.sleep(level)  # type: ignore[arg-type]
            assert not stands_by(daemon, gpu_model)
            torch.cuda.empty_cache()
            daemon.wake_up(["weights"])
            daemon.refit(gpu_model)
            daemon.wake_up(["kv_cache"])
            assert sampled(daemon) == before
        until_it_stands_by(daemon, gpu_model)


def test_after_deep_sleep_nothing_is_served_before_a_refit(sleepy: Daemon, gpu_model: PreTrainedModel) -> None:
    """Level 2 drops the weights: waking up without a refit must not serve garbage."""
    sleepy.refit(gpu_model)
    before = sampled(sleepy)
    sleepy.sleep(2)
    sleepy.wake_up()
    with pytest.raises(RefitdError) as refused:
        sampled(sleepy)
    assert refused.value.code is ErrorCode.ASLEEP
    sleepy.refit(gpu_model)
    assert sampled(sleepy) == before


def test_an_fp8_engine_takes_bf16_weights_twice(engines: dict[str, DaemonProcess], gpu_model: PreTrainedModel) -> None:
    """Through vLLM's loader, which quantises: each time what a fresh fp8 engine on the same weights gives."""
    with engines["fp8-0"].connect() as first, engines["fp8-1"].connect() as second:
        fresh = {0: sampled(first), 1: sampled(second)}
        for seed in (0, 1, 0):
            load_values(gpu_model, seed)
            report = second.refit(gpu_model)
            assert report.path in ("loader", "mixed")
            assert sampled(second) == fresh[seed]


def test_waking_without_memory_fails_and_works_once_there_is_some(sleepy: Daemon, gpu_model: PreTrainedModel) -> None:
    """An error, then success."""
    sleepy.refit(gpu_model)
    before = sampled(sleepy)
    sleepy.sleep(1)
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - (2 << 30), dtype=torch.uint8, device="cuda")
    with pytest.raises(RefitdError) as refused:
        sleepy.wake_up()
    assert refused.value.code is ErrorCode.ENGINE_ERROR
    del hog
    torch.cuda.empty_cache()
    sleepy.wake_up()
    assert sampled(sleepy) == before
