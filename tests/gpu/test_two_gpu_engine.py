"""One engine whose two tensor-parallel workers have a GPU each, and a trainer in one process with memory on both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("cupy", reason="needs CuPy, of the extra cuda12 or cuda13")

from refit_protocol.messages import (
    AcquireWriter,
    CommitRefit,
    GroupMember,
    OpenSource,
    RefitCommitted,
    SourceOpened,
    WriterAcquired,
)
from refit_protocol.tensors import Shard, SourceTensor, aligned
from refit_trainer import Daemon, share_parameters
from refit_trainer.cuda_memory import CudaBackend, CudaMemory
from refit_trainer.layouts import dtype_of
from tests.daemon_process import DaemonProcess
from tests.gpu.conftest import SETTINGS, SHAPE, digest_of, load_values, running_daemons, sampled
from tests.gpu.test_standing_refits import bell_of
from tests.waiting import until
from tests.wire import RawClient, raw_client
from tests.worker.models import build_model, random_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")

WORLD_SIZE = 2
WIDE = {"head_dim": 64, "hidden_size": 512, "intermediate_size": 4096, "num_attention_heads": 32}
# What vLLM's own reduction needs is probed in processes of their own, which takes longer than these tests.
TWO_GPUS = (*SETTINGS, "engine.tensor_parallel_size=2", "engine.extra.disable_custom_all_reduce=true")


@pytest.fixture(scope="module")
def engines(checkpoints: dict[int, Path], short_directory: Path) -> Iterator[dict[str, DaemonProcess]]:
    """Two of them, each on both GPUs and started on the weights of one seed."""
    wanted = {f"two-gpus-{seed}": (path, TWO_GPUS) for seed, path in checkpoints.items()}
    with running_daemons(short_directory, wanted) as processes:
        yield processes


@pytest.fixture(scope="module")
def loaded(engines: dict[str, DaemonProcess]) -> dict[int, tuple[list[int], list[float]]]:
    """What each said before any refit."""
    found = {}
    for seed in (0, 1):
        with engines[f"two-gpus-{seed}"].connect() as daemon:
            assert daemon.status().version == 0
            assert len(set(daemon.status().devices)) == WORLD_SIZE
            found[seed] = sampled(daemon)
    return found


@pytest.fixture
def daemon(engines: dict[str, DaemonProcess], loaded: dict[int, tuple[list[int], list[float]]]) -> Iterator[Daemon]:
    """The one that the tests refit."""
    assert loaded
    with engines["two-gpus-0"].connect() as connected:
        yield connected


def spread_model(devices: tuple[str, str]) -> PreTrainedModel:
    """The layers on these devices by turns, the rest on the first."""
    model = random_model("qwen3", seed=0, **SHAPE).to(devices[0])
    for index, layer in enumerate(model.model.layers):
        layer.to(devices[index % 2])
    return model


@pytest.mark.parametrize(
    "devices",
    [("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), ("cuda:0", "cuda:1")],
    ids=["first GPU", "second GPU", "layers on both"],
)
def test_in_place_refits_are_exact(
    daemon: Daemon, loaded: dict[int, tuple[list[int], list[float]]], devices: tuple[str, str]
) -> None:
    """Each worker reads its slices from whichever GPU they lie on: ids and logprobs are those of engines that loaded
    the same weights, and every element is the trainer's."""
    model = share_parameters(spread_model(devices))
    for seed in (1, 0, 1):
        load_values(model, seed)
        report = daemon.refit(model, attest="full")
        assert report.path == "plan"
        assert sampled(daemon) == loaded[seed]
        assert daemon.digest("full").digest == digest_of(daemon, model)


@pytest.mark.parametrize("bucket_bytes", [1 << 16, 1 << 22])
def test_bucket_refits_are_exact(
    engines: dict[str, DaemonProcess],
    daemon: Daemon,
    loaded: dict[int, tuple[list[int], list[float]]],
    bucket_bytes: int,
) -> None:
    """Both workers read each bucket, which lies on one of their GPUs, before it is packed again."""
    model = spread_model(("cuda:0", "cuda:1"))
    with engines["two-gpus-0"].connect(bucket_bytes=bucket_bytes) as packing:
        for seed in (1, 0):
            load_values(model, seed)
            packing.refit(iter(model.named_parameters()))
            assert sampled(packing) == loaded[seed]
            assert packing.digest("full").digest == digest_of(packing, model)


def test_what_was_enqueued_on_both_gpus_is_read(daemon: Daemon) -> None:
    """A long kernel on each GPU, then the new values, no host synchronisation; overwritten as soon as the refit
    returns."""
    model = share_parameters(spread_model(("cuda:0", "cuda:1")))
    values = []
    for seed in (0, 1):
        load_values(model, seed)
        values.append([parameter.detach().clone() for parameter in model.parameters()])
    for round_ in range(6):
        for device in range(WORLD_SIZE):
            with torch.cuda.device(device):
                torch.cuda._sleep(20_000_000)
        write(model, values[round_ % 2])
        daemon.refit(model)
        write(model, values[1 - round_ % 2])
        expected = random_model("qwen3", seed=round_ % 2, **SHAPE)
        assert daemon.digest("full").digest == digest_of(daemon, expected)


@pytest.fixture(scope="module")
def wide(short_directory: Path) -> Iterator[DaemonProcess]:
    """Its workers' slices have rows that the kernel copies: a refit is one launch, as that of a real model."""
    path = build_model("qwen3", short_directory / "gpu-model-wide", seed=0, **WIDE)
    with running_daemons(short_directory, {"two-gpus-wide": (path, TWO_GPUS)}) as processes:
        yield processes["two-gpus-wide"]


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")], ids=["one GPU", "both"])
def test_refits_that_stand_by_are_exact(wide: DaemonProcess, devices: tuple[str, str]) -> None:
    """Both workers' copies wait for the bell, and are rung for together."""
    model = random_model("qwen3", seed=0, **WIDE).to(devices[0])
    model.lm_head.to(devices[1])
    share_parameters(model)
    with wide.connect(stand_by=True) as daemon:
        daemon.acquire_writer(takeover=True)
        daemon.refit(model)
        for seed in (1, 0, 1):
            bell = bell_of(daemon, model)
            until(lambda bell=bell: bell._awaited[:WORLD_SIZE].all(), "a refit to stand by")
            values = [parameter.detach() for parameter in random_model("qwen3", seed=seed, **WIDE).parameters()]
            write(model, values)
            daemon.refit(model)
            assert daemon.digest("full").digest == digest_of(daemon, model)


def write(model: PreTrainedModel, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


@dataclass(frozen=True)
class Lent:
    """What one rank holds, in one allocation on its GPU."""

    memory: CudaMemory
    parts: list[SourceTensor]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of_rank(cls, rank: int) -> Lent:
        memory = CudaBackend().buckets(1, 1 << 24, torch.device("cuda", rank))
        parts: list[SourceTensor] = []
        tensors: dict[str, torch.Tensor] = {}
        end = 0
        for name, tensor, shard in held(0, rank):
            parts.append(
                SourceTensor(
                    name=name,
                    dtype=dtype_of(tensor),
                    shape=tuple(tensor.shape),
                    segment=0,
                    offset_bytes=end,
                    shard=shard,
                )
            )
            tensors[name] = memory.views[0][end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            end = aligned(end + tensor.nbytes, 64)
        return cls(memory, parts, tensors)

    def write(self, seed: int, rank: int) -> None:
        for name, tensor, _ in held(seed, rank):
            self.tensors[name].copy_(tensor)
        torch.cuda.synchronize(rank)


def held(seed: int, rank: int) -> Iterator[tuple[str, torch.Tensor, Shard | None]]:
    """Half of the rows of each matrix; vectors are whole on both ranks."""
    for name, parameter in random_model("qwen3", seed=seed, **SHAPE).named_parameters():
        whole = parameter.detach()
        if whole.dim() == 1:
            yield name, whole, None
        else:
            rows = whole.shape[0] // WORLD_SIZE
            offsets = (rank * rows, *(0 for _ in whole.shape[1:]))
            yield name, whole[rank * rows : (rank + 1) * rows], Shard(whole=tuple(whole.shape), offsets=offsets)


def test_ranks_lend_the_shards_on_their_gpus(
    engines: dict[str, DaemonProcess], daemon: Daemon, loaded: dict[int, tuple[list[int], list[float]]]
) -> None:
    """Row shards of a trainer with a rank on each GPU, committed together: row-parallel slices come from both."""
    endpoint = engines["two-gpus-0"].endpoint
    lent = [Lent.of_rank(rank) for rank in range(WORLD_SIZE)]
    with ExitStack() as stack:
        ranks = [stack.enter_context(raw_client(endpoint)) for _ in lent]
        for client in ranks:
            client.hello(pid=os.getpid())
        epoch = ranks[0].ask(AcquireWriter(), WriterAcquired).epoch
        source = opened(ranks, lent, epoch)
        for seed in (1, 0, 1):
            for rank, memory in enumerate(lent):
                memory.write(seed, rank)
            for client in ranks:
                client.post(CommitRefit(epoch=epoch, source=source, attest="full"))
            for client in ranks:
                committed = client.receive().body
                assert isinstance(committed, RefitCommitted), committed
                assert committed.report.path == "plan"
            assert sampled(daemon) == loaded[seed]


def opened(ranks: list[RawClient], lent: list[Lent], epoch: int) -> int:
    for rank, (client, memory) in enumerate(zip(ranks, lent, strict=True)):
        member = GroupMember(group="both", rank=rank, world_size=WORLD_SIZE)
        segments = memory.memory.segments
        client.post(OpenSource(epoch=epoch, kind="inplace", segments=segments, tensors=memory.parts, member=member))
    answers = [client.receive().body for client in ranks]
    assert isinstance(answers[0], SourceOpened), answers
    assert answers[0] == answers[1]
    return answers[0].source
