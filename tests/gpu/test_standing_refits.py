"""Refits that stand by on a real GPU: their copies wait on the device while the gate is open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.states import EngineState
from refit_trainer import Daemon, NotShareable, RefitdError, share_parameters
from refit_trainer.cuda_bell import CudaBell
from refit_trainer.report import ComingReport
from refit_trainer.sharing import shared_module
from tests.daemon_process import DaemonProcess
from tests.gpu.conftest import digest_of, load_values, sampled, trainer_model
from tests.gpu.peers import peer
from tests.waiting import until

MANY = 60
FLAT_AFTER = 10
# Some seconds on any GPU, unless its process is killed.
LONG_CYCLES = 20_000_000_000


def bell_of(daemon: Daemon, model: PreTrainedModel) -> CudaBell:
    shared = shared_module(model)
    assert shared is not None
    bell = daemon._daemon._role.standing_bell(shared.memory)
    assert isinstance(bell, CudaBell)
    return bell


def stands_by(daemon: Daemon, model: PreTrainedModel) -> bool:
    return bool(bell_of(daemon, model)._awaited[0])


def until_it_stands_by(daemon: Daemon, model: PreTrainedModel) -> None:
    until(lambda: stands_by(daemon, model), "a refit to stand by")


@pytest.fixture
def standing(gpu_process: DaemonProcess) -> Iterator[Daemon]:
    """A trainer that wants refits to stand by, and has the writer's role."""
    with gpu_process.connect(stand_by=True) as connected:
        connected.acquire_writer(takeover=True)
        yield connected


@pytest.fixture
def replayed(standing: Daemon, gpu_model: PreTrainedModel) -> PreTrainedModel:
    """A shared model that was refitted once: from now on its refits stand by."""
    standing.refit(gpu_model)
    return gpu_model


@pytest.mark.parametrize("attest", ["off", "sampled", "full"])
def test_what_the_parameters_hold_at_the_refit_is_served(
    standing: Daemon, replayed: PreTrainedModel, attest: str
) -> None:
    """Not what they held when it began to stand by; the daemon is ready all the time."""
    standing.refit(replayed, attest=attest)
    for seed in (5, 6):
        until_it_stands_by(standing, replayed)
        assert standing.status().state is EngineState.READY
        load_values(replayed, seed)
        report = standing.refit(replayed, attest=attest)
        assert (report.version, report.stood_by) == (standing.status().version, True)
        assert standing.digest("full").digest == digest_of(standing, replayed)


def test_a_refit_of_other_terms_is_exact_too(standing: Daemon, replayed: PreTrainedModel) -> None:
    """Rung for or not, it gives way to that."""
    name = "model.norm.weight"
    for terms in ({"attest": "full"}, {"check_finite": True}, {"only": [name]}, {"version": 1 << 40}):
        until_it_stands_by(standing, replayed)
        with torch.no_grad():
            replayed.get_parameter(name).mul_(0.5)
        standing.refit(replayed, **terms)
        assert standing.digest("full").digest == digest_of(standing, replayed)
        standing.refit(replayed)


def test_the_trainers_stream_rings_when_it_comes_to_it(standing: Daemon, replayed: PreTrainedModel) -> None:
    """A long kernel, then the new values, no host synchronisation; overwritten as soon as the refit comes back."""
    values = [[p.detach().clone() for p in trainer_model(seed).parameters()] for seed in (0, 1)]
    expected = [digest_of(standing, trainer_model(seed)) for seed in (0, 1)]
    for round_ in range(20):
        until_it_stands_by(standing, replayed)
        with torch.no_grad():
            torch.cuda._sleep(10_000_000)
            torch._foreach_copy_(list(replayed.parameters()), values[round_ % 2])
            standing.refit(replayed)
            torch._foreach_copy_(list(replayed.parameters()), values[1 - round_ % 2])
        assert standing.digest("full").digest == expected[round_ % 2]


def test_it_comes_back_before_the_daemon_has_answered(standing: Daemon, replayed: PreTrainedModel) -> None:
    """Standing by or not, in place or through buckets, and the next one comes behind it."""
    tensors = dict(replayed.named_parameters())
    for weights in (replayed, tensors):
        standing.refit(weights)
        reports = [standing.refit(weights) for _ in range(20)]
        assert any(isinstance(report, ComingReport) for report in reports)
        versions = [report.version for report in reports]
        assert versions == list(range(versions[0], versions[0] + 20))


def test_requests_pass_as_ever(standing: Daemon, replayed: PreTrainedModel) -> None:
    """It gives way to them, and stands by again afterwards; a refit in between is an ordinary one."""
    before = sampled(standing)
    for _ in range(3):
        until_it_stands_by(standing, replayed)
        assert sampled(standing) == before
        assert not stands_by(standing, replayed)
    standing.refit(replayed)
    assert sampled(standing) == before


def test_what_was_rung_for_and_not_committed_is_not_served(
    standing: Daemon, replayed: PreTrainedModel, gpu_process: DaemonProcess
) -> None:
    """Whoever comes waits for the commit, not for ever; a full refit mends it."""
    until_it_stands_by(standing, replayed)
    load_values(replayed, 8)
    torch.cuda.synchronize()
    assert bell_of(standing, replayed).ring_awaited()
    with gpu_process.connect("looks on") as other:
        with pytest.raises(RefitdError) as refused:
            sampled(other)
        assert refused.value.code is ErrorCode.TORN
    standing.refit(replayed)
    assert standing.digest("full").digest == digest_of(standing, replayed)


def test_what_was_rung_for_goes_with_its_trainer(
    gpu_process: DaemonProcess, gpu_daemon: Daemon, gpu_model: PreTrainedModel
) -> None:
    """At once: no commit can come any more."""
    with gpu_process.connect(stand_by=True) as trainer:
        trainer.acquire_writer(takeover=True)
        trainer.refit(gpu_model)
        until_it_stands_by(trainer, gpu_model)
        torch.cuda.synchronize()
        assert bell_of(trainer, gpu_model).ring_awaited()
    until(lambda: gpu_daemon.status().state is EngineState.TORN, "the daemon to know", seconds=5)
    gpu_daemon.acquire_writer(takeover=True)
    gpu_daemon.refit(gpu_model)
    assert gpu_daemon.digest("full").digest == digest_of(gpu_daemon, gpu_model)


def test_parameters_that_were_moved_are_refused_and_the_next_refit_mends_it(
    standing: Daemon, replayed: PreTrainedModel
) -> None:
    """The copy had begun by then."""
    until_it_stands_by(standing, replayed)
    replayed.lm_head.weight = torch.nn.Parameter(replayed.lm_head.weight.detach() * 2)
    with pytest.raises(NotShareable):
        standing.refit(replayed)
    assert standing.status().state is EngineState.TORN
    share_parameters(replayed)
    standing.refit(replayed)
    assert standing.digest("full").digest == digest_of(standing, replayed)


def test_many_leave_memory_and_descriptors_flat(
    gpu_process: DaemonProcess, standing: Daemon, replayed: PreTrainedModel
) -> None:
    """Taken up and given way by turns."""
    processes = [psutil.Process(pid) for pid in (os.getpid(), gpu_process.process.pid, *gpu_process.engine_pids())]

    def usage() -> tuple[int, int]:
        return torch.cuda.mem_get_info()[0], sum(process.num_fds() for process in processes)

    for round_ in range(MANY):
        until_it_stands_by(standing, replayed)
        if round_ % 2:
            standing.refit(replayed)
        else:
            standing.digest()
        if round_ == FLAT_AFTER:
            free_bytes, descriptors = usage()
    assert usage()[0] >= free_bytes
    assert usage()[1] <= descriptors


def busy_trainer(connection: Connection, endpoint: str) -> None:
    """Refits behind a kernel that it will not live to see the end of."""
    with Daemon.connect(endpoint, client="peer", stand_by=True) as daemon:
        daemon.acquire_writer(takeover=True)
        model = share_parameters(trainer_model(1))
        daemon.refit(model)
        until_it_stands_by(daemon, model)
        connection.send("stands by")
        connection.recv()
        torch.cuda._sleep(LONG_CYCLES)
        connection.send("refitting")
        daemon.refit(model)


@pytest.mark.parametrize("when", ["it stands by", "its stream is on the way to the bell"])
def test_a_killed_trainer_has_written_nothing(
    gpu_process: DaemonProcess, gpu_daemon: Daemon, gpu_model: PreTrainedModel, when: str
) -> None:
    """The engine serves what it did, and the next trainer refits."""
    with peer(busy_trainer, gpu_process.endpoint) as trainer:
        assert trainer.answer() == "stands by"
        digest = gpu_daemon.digest("full").digest
        if when != "it stands by":
            assert trainer.ask("refit") == "refitting"
        trainer.kill()
        until(lambda: gpu_daemon.status().state is EngineState.READY, "the gate open again")
        assert gpu_daemon.digest("full").digest == digest
    gpu_daemon.acquire_writer(takeover=True)
    load_values(gpu_model, 7)
    gpu_daemon.refit(gpu_model)
    assert gpu_daemon.digest("full").digest == digest_of(gpu_daemon, gpu_model)
