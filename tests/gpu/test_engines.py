"""Engines of other kinds: CUDA graphs, sleep that frees memory, fp8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_trainer import Daemon, RefitdError
from tests.daemon_process import running_daemon
from tests.gpu.conftest import SETTINGS, load_values
from tests.gpu.test_refit import digest_of, sampled

SLEEPY = ("engine.enable_sleep_mode=true", "engine.gpu_memory_utilization=0.2")


def test_cuda_graphs_see_every_refit(
    checkpoints: dict[int, Path], short_directory: Path, gpu_daemon: Daemon, gpu_model: PreTrainedModel
) -> None:
    """After five refits a compiled engine with graphs gives the ids of an eager one."""
    settings = (*SETTINGS, "engine.enforce_eager=false", "engine.max_num_seqs=8")
    with running_daemon(checkpoints[0], short_directory / "graphs", *settings) as process, process.connect() as graphs:
        for seed in (1, 0, 1, 0, 1):
            load_values(gpu_model, seed)
            gpu_daemon.refit(gpu_model)
            graphs.refit(gpu_model)
            assert graphs.digest("full").digest == gpu_daemon.digest("full").digest
            assert sampled(graphs)[0] == sampled(gpu_daemon)[0]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_to_the_trainer_and_a_refit_ends_it(
    checkpoints: dict[int, Path], short_directory: Path, gpu_model: PreTrainedModel, level: int
) -> None:
    """Asleep, most of the engine's memory is the trainer's; wake weights, refit, wake the cache, and all is exact."""
    directory = short_directory / f"sleep-{level}"
    with running_daemon(checkpoints[0], directory, *SETTINGS, *SLEEPY) as process, process.connect() as daemon:
        before = sampled(daemon)
        daemon.refit(gpu_model)
        awake_free = torch.cuda.mem_get_info()[0]
        daemon.sleep(level)
        freed = torch.cuda.mem_get_info()[0] - awake_free
        assert freed > 5 << 30
        with pytest.raises(RefitdError) as refused:
            sampled(daemon)
        assert refused.value.code is ErrorCode.ASLEEP
        held = torch.empty(freed - (1 << 30), dtype=torch.uint8, device="cuda").fill_(1)
        del held
        torch.cuda.empty_cache()
        daemon.wake_up(["weights"])
        daemon.refit(gpu_model)
        daemon.wake_up(["kv_cache"])
        assert sampled(daemon) == before
        assert daemon.digest("full").digest == digest_of(daemon, gpu_model)


def test_after_deep_sleep_nothing_is_served_before_a_refit(
    checkpoints: dict[int, Path], short_directory: Path, gpu_model: PreTrainedModel
) -> None:
    """Level 2 drops the weights: waking up without a refit must not serve garbage."""
    directory = short_directory / "deep"
    with running_daemon(checkpoints[0], directory, *SETTINGS, *SLEEPY) as process, process.connect() as daemon:
        before = sampled(daemon)
        daemon.sleep(2)
        daemon.wake_up()
        with pytest.raises(RefitdError) as refused:
            sampled(daemon)
        assert refused.value.code in (ErrorCode.TORN, ErrorCode.ASLEEP)
        daemon.refit(gpu_model)
        assert sampled(daemon) == before


def test_waking_without_memory_fails_and_works_once_there_is_some(
    checkpoints: dict[int, Path], short_directory: Path, gpu_model: PreTrainedModel
) -> None:
    """An error, then success."""
    directory = short_directory / "tight"
    with running_daemon(checkpoints[0], directory, *SETTINGS, *SLEEPY) as process, process.connect() as daemon:
        before = sampled(daemon)
        daemon.sleep(1)
        hog = torch.empty(torch.cuda.mem_get_info()[0] - (2 << 30), dtype=torch.uint8, device="cuda")
        with pytest.raises(RefitdError):
            daemon.wake_up()
        del hog
        torch.cuda.empty_cache()
        daemon.wake_up()
        assert sampled(daemon) == before


def test_an_fp8_engine_takes_bf16_weights_twice(
    checkpoints: dict[int, Path], short_directory: Path, gpu_model: PreTrainedModel
) -> None:
    """Through vLLM's loader, which quantises: each time what a fresh fp8 engine on the same weights gives."""
    settings = (*SETTINGS, 'engine.extra.quantization="fp8"')
    fresh = {}
    for seed, path in checkpoints.items():
        with running_daemon(path, short_directory / f"fp8-{seed}", *settings) as process, process.connect() as daemon:
            fresh[seed] = sampled(daemon)
            if seed == 1:
                for refit_seed in (0, 1, 0):
                    load_values(gpu_model, refit_seed)
                    report = daemon.refit(gpu_model)
                    assert report.path in ("loader", "mixed")
                    assert sampled(daemon) == fresh[refit_seed]
