"""Refits on a real GPU through the whole stack: trainer, sockets, daemon, vLLM's worker."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.states import EngineState
from refit_trainer import Daemon, NotShareable, RefitdError, Sampling, share_parameters, unshare_parameters
from tests.canary import unharmed
from tests.daemon_process import DaemonProcess
from tests.gpu.conftest import (
    PROMPT,
    SETTINGS,
    SHAPE,
    digest_of,
    load_values,
    running_daemons,
    sampled,
    trainer_model,
)
from tests.gpu.peers import peer
from tests.worker.models import build_model, random_model

MANY = 300
FLAT_AFTER = 10
# Half a gigabyte: what a second copy of it would take shows beside what a process takes by itself.
LARGER = {**SHAPE, "vocab_size": 64_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}


def test_refits_are_exact_from_a_to_b_and_back(
    gpu_daemon: Daemon, gpu_model: PreTrainedModel, fresh: dict[int, tuple[list[int], list[float]]]
) -> None:
    """Greedy ids and logprobs equal, bit for bit, those of daemons just started on the same weights."""
    for seed in (0, 1, 0):
        load_values(gpu_model, seed)
        report = gpu_daemon.refit(gpu_model)
        assert report.path == "plan"
        assert sampled(gpu_daemon) == fresh[seed]


@pytest.mark.parametrize("attest", ["off", "sampled", "full"])
def test_the_daemon_serves_exactly_the_trainers_weights(
    gpu_daemon: Daemon, gpu_model: PreTrainedModel, attest: str
) -> None:
    """The full digest read on the device equals the one the trainer computes on the CPU."""
    load_values(gpu_model, 3)
    gpu_daemon.refit(gpu_model, attest=attest)
    assert gpu_daemon.digest("full").digest == digest_of(gpu_daemon, gpu_model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_float_dtypes_are_cast_as_torch_casts(gpu_daemon: Daemon, dtype: torch.dtype) -> None:
    """In place and through buckets."""
    model = share_parameters(trainer_model(4, dtype))
    gpu_daemon.refit(model)
    expected = digest_of(gpu_daemon, model.to(torch.bfloat16))
    assert gpu_daemon.digest("full").digest == expected
    gpu_daemon.refit(dict(trainer_model(4, dtype).named_parameters()))
    assert gpu_daemon.digest("full").digest == expected


@pytest.mark.parametrize("bucket_bytes", [1 << 16, (1 << 16) + 4096, 1 << 24])
def test_buckets_of_any_size_give_the_same(gpu_process: DaemonProcess, bucket_bytes: int) -> None:
    """Tensors larger than a bucket are split."""
    with gpu_process.connect(bucket_bytes=bucket_bytes) as daemon:
        model = trainer_model(5)
        for seed in (5, 6):
            load_values(model, seed)
            daemon.refit(dict(model.named_parameters()))
            assert daemon.digest("full").digest == digest_of(daemon, model)


def test_a_first_refit_through_buckets_is_proven_and_gives_its_memory_back(short_directory: Path) -> None:
    """The proof works in device memory; by the plan and exact from then on."""
    checkpoint = build_model("qwen3", short_directory / "gpu-larger", seed=0, **LARGER)
    with (
        running_daemons(short_directory, {"gpu-first": (checkpoint, SETTINGS)}) as processes,
        processes["gpu-first"].connect(bucket_bytes=1 << 24) as daemon,
    ):
        model = random_model("qwen3", seed=1, **LARGER).to("cuda")
        free_bytes = torch.cuda.mem_get_info()[0]
        for _ in range(2):
            assert daemon.refit(dict(model.named_parameters())).path == "plan"
            assert daemon.digest("full").digest == digest_of(daemon, model)
        size_bytes = sum(parameter.nbytes for parameter in model.parameters())
        assert torch.cuda.mem_get_info()[0] > free_bytes - size_bytes // 2


@pytest.mark.parametrize("way", ["inplace", "bucket"])
def test_a_refit_sees_what_was_enqueued_and_nothing_that_came_later(gpu_daemon: Daemon, way: str) -> None:
    """100 times: a long kernel, then the new values, no host synchronisation; overwritten at the ack."""
    model = trainer_model(0)
    if way == "inplace":
        share_parameters(model)
    values = [[p.detach().clone() for p in trainer_model(seed).parameters()] for seed in (0, 1)]
    expected = [digest_of(gpu_daemon, trainer_model(seed)) for seed in (0, 1)]
    for round_ in range(100):
        with torch.no_grad():
            torch.cuda._sleep(10_000_000)
            torch._foreach_copy_(list(model.parameters()), values[round_ % 2])
            gpu_daemon.refit(model)
            torch._foreach_copy_(list(model.parameters()), values[1 - round_ % 2])
        assert gpu_daemon.digest("full").digest == expected[round_ % 2]


@pytest.mark.parametrize("way", ["inplace", "bucket"])
def test_300_refits_leave_memory_and_descriptors_flat(gpu_process: DaemonProcess, way: str) -> None:
    """Device memory and open descriptors of trainer, daemon and engine."""
    with gpu_process.connect(bucket_bytes=1 << 17) as daemon:
        model = trainer_model(0)
        if way == "inplace":
            share_parameters(model)
        processes = [psutil.Process(pid) for pid in (os.getpid(), gpu_process.process.pid, *gpu_process.engine_pids())]

        def usage() -> tuple[int, int]:
            return torch.cuda.mem_get_info()[0], sum(process.num_fds() for process in processes)

        for round_ in range(MANY):
            daemon.refit(model)
            if round_ == FLAT_AFTER:
                free_bytes, descriptors = usage()
        assert usage()[0] >= free_bytes
        assert usage()[1] <= descriptors


def test_sharing_anew_300_times_leaves_memory_and_descriptors_flat(gpu_process: DaemonProcess) -> None:
    """A source opened and closed each time: what was mapped is unmapped."""
    process = psutil.Process(gpu_process.engine_pids()[0])
    for round_ in range(60):
        with gpu_process.connect() as daemon:
            model = share_parameters(trainer_model(0))
            daemon.refit(model)
            unshare_parameters(model)
        del model
        torch.cuda.empty_cache()
        if round_ == FLAT_AFTER:
            free_bytes, descriptors = torch.cuda.mem_get_info()[0], process.num_fds()
    assert torch.cuda.mem_get_info()[0] >= free_bytes - (2 << 20)
    assert process.num_fds() <= descriptors


def test_versions_change_between_tokens_while_requests_run(gpu_daemon: Daemon, gpu_model: PreTrainedModel) -> None:
    """20 refits with `keep` under load: every stream ends, its spans cover its tokens, all logprobs are finite."""
    done: list[object] = []

    def load() -> None:
        for sample in gpu_daemon.generate([PROMPT] * 8, Sampling(max_tokens=400, ignore_eos=True)):
            assert sum(run.count for run in sample.versions) == len(sample.token_ids) == 400
            assert torch.isfinite(torch.from_numpy(sample.logprobs)).all()
            done.append(sample)

    thread = threading.Thread(target=load)
    thread.start()
    for round_ in range(20):
        load_values(gpu_model, round_ % 2)
        gpu_daemon.refit(gpu_model, policy="keep")
    thread.join()
    assert len(done) == 8


def trainer_process(connection: Connection, endpoint: str) -> None:
    """Refits for ever, or says why it cannot."""
    with Daemon.connect(endpoint, client="peer") as daemon:
        model = share_parameters(trainer_model(1))
        connection.send(daemon.refit(model).path)
        connection.recv()
        connection.send("refitting")
        while True:
            daemon.refit(model)


def test_a_trainer_with_expandable_segments_refits(gpu_process: DaemonProcess) -> None:
    """Its parameters are moved into memory that can be exported."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with peer(trainer_process, gpu_process.endpoint, environment=environment) as trainer:
        assert trainer.answer() == "plan"
        with gpu_process.connect() as daemon:
            assert daemon.digest("full").digest == digest_of(daemon, trainer_model(1))


@pytest.mark.parametrize("after_seconds", [0.0, 0.003, 0.01])
def test_a_killed_trainer_takes_nothing_along(
    gpu_process: DaemonProcess, gpu_model: PreTrainedModel, after_seconds: float
) -> None:
    """Killed between and inside refits: the next trainer refits, and what is served is its weights."""
    with peer(trainer_process, gpu_process.endpoint) as trainer:
        assert trainer.answer() == "plan"
        trainer.ask("go on")
        threading.Event().wait(after_seconds)
        trainer.kill()
    with gpu_process.connect() as daemon:
        daemon.acquire_writer(takeover=True)
        load_values(gpu_model, 7)
        daemon.refit(gpu_model)
        assert daemon.digest("full").digest == digest_of(daemon, gpu_model)
        assert daemon.status().state is EngineState.READY


def test_bad_handles_are_refused_and_the_engine_goes_on(gpu_daemon: Daemon, gpu_model: PreTrainedModel) -> None:
    """Foreign bytes, another device, the same handle twice: typed, and nothing served changes."""
    import msgspec

    from refit_trainer.cuda_memory import CudaMemory
    from refit_trainer.sharing import shared_module

    gpu_daemon.refit(gpu_model)
    shared = shared_module(gpu_model)
    assert shared is not None
    good = shared.memory._exported
    first, *rest = [exported.segment for exported in good]
    wrong = {
        ErrorCode.MEMORY_UNAVAILABLE: [msgspec.structs.replace(first, handle=bytes(64)), *rest],
        ErrorCode.WRONG_DEVICE: [msgspec.structs.replace(first, device_uuid="GPU-0"), *rest],
        ErrorCode.INVALID_DESCRIPTOR: [first, *rest, first],
    }
    for code, segments in wrong.items():
        with unharmed(gpu_daemon):
            exported = [replace(good[0], segment=segment) for segment in segments]
            shared.memory = CudaMemory(exported)
            with pytest.raises(RefitdError) as raised:
                gpu_daemon.refit(gpu_model)
            assert raised.value.code is code


def test_a_module_on_two_kinds_of_devices_is_refused_with_advice() -> None:
    """Half of it on the CPU: the error says what is wrong."""
    model = trainer_model(0)
    model.lm_head.to("cpu")
    with pytest.raises(NotShareable, match="one kind of device"):
        share_parameters(model)
