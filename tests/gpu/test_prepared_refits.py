"""Prepared refits on a real GPU: copies that wait on the device for the trainer's bell."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.states import EngineState
from refit_trainer import Daemon, Sampling, share_parameters
from refit_trainer.prepared import PreparedRefit
from tests.canary import unharmed
from tests.daemon_process import DaemonProcess
from tests.gpu.conftest import PROMPT, digest_of, load_values, trainer_model
from tests.gpu.peers import Peer, peer
from tests.waiting import until

MANY = 200
MANY_SESSIONS = 40
FLAT_AFTER = 10
# Some seconds on any GPU, unless its process is killed.
LONG_CYCLES = 20_000_000_000


@pytest.fixture
def replayed(gpu_daemon: Daemon, gpu_model: PreTrainedModel) -> PreTrainedModel:
    """A shared model that was refitted once: from now on its refits are one launch."""
    gpu_daemon.refit(gpu_model)
    return gpu_model


def ring_of(prepared: PreparedRefit) -> int | None:
    return prepared._preparation.prepared.ring


def ring_alone(prepared: PreparedRefit) -> None:
    """The bell and nothing else: no message follows."""
    preparation = prepared._preparation
    bell = preparation._bell
    assert bell is not None
    assert preparation.prepared.ring is not None
    bell.ring(preparation.prepared.ring, preparation.prepared.workers)


@pytest.mark.parametrize("attest", ["off", "sampled", "full"])
def test_what_the_parameters_hold_at_the_refit_is_served(
    gpu_daemon: Daemon, replayed: PreTrainedModel, attest: str
) -> None:
    """Not what they held when it was prepared; the copy waited for the bell."""
    for seed in (5, 6):
        with gpu_daemon.prepare_refit(replayed, attest=attest) as prepared:
            assert ring_of(prepared) is not None
            load_values(replayed, seed)
            torch.cuda.synchronize()
            prepared.refit()
        assert prepared.report().version == prepared.version == gpu_daemon.status().version
        assert gpu_daemon.digest("full").digest == digest_of(gpu_daemon, replayed)


def test_an_ordinary_call_ends_it(gpu_daemon: Daemon, replayed: PreTrainedModel) -> None:
    """`refit()` of the same module, which rings the bell as the prepared one's own does."""
    with gpu_daemon.prepare_refit(replayed) as prepared:
        assert ring_of(prepared) is not None
        load_values(replayed, 12)
        report = gpu_daemon.refit(replayed)
    assert report.milliseconds.waited > 0
    assert gpu_daemon.digest("full").digest == digest_of(gpu_daemon, replayed)


def test_the_trainers_stream_rings_when_it_comes_to_it(gpu_daemon: Daemon, replayed: PreTrainedModel) -> None:
    """100 times: a long kernel, then the new values, no host synchronisation; overwritten at the ack."""
    values = [[p.detach().clone() for p in trainer_model(seed).parameters()] for seed in (0, 1)]
    expected = [digest_of(gpu_daemon, trainer_model(seed)) for seed in (0, 1)]
    for round_ in range(100):
        with torch.no_grad(), gpu_daemon.prepare_refit(replayed) as prepared:
            torch.cuda._sleep(10_000_000)
            torch._foreach_copy_(list(replayed.parameters()), values[round_ % 2])
            prepared.refit()
            torch._foreach_copy_(list(replayed.parameters()), values[1 - round_ % 2])
        assert gpu_daemon.digest("full").digest == expected[round_ % 2]


def test_the_bell_alone_starts_the_copy(gpu_daemon: Daemon, replayed: PreTrainedModel) -> None:
    """Rung, and then aborted: everything had been written, so the engine is torn, and a full refit mends it."""
    with gpu_daemon.prepare_refit(replayed) as prepared:
        ring_alone(prepared)
        prepared.abort()
    assert gpu_daemon.status().state is EngineState.TORN
    with gpu_daemon.prepare_refit(replayed) as prepared:
        load_values(replayed, 8)
        prepared.refit()
    assert gpu_daemon.digest("full").digest == digest_of(gpu_daemon, replayed)


def test_without_the_bell_the_end_starts_the_copy(gpu_daemon: Daemon, replayed: PreTrainedModel) -> None:
    with gpu_daemon.prepare_refit(replayed) as prepared:
        preparation = prepared._preparation
        preparation.prepared = msgspec.structs.replace(preparation.prepared, ring=None)
        load_values(replayed, 9)
        prepared.refit()
    assert gpu_daemon.digest("full").digest == digest_of(gpu_daemon, replayed)


def test_what_is_aborted_has_copied_nothing(gpu_daemon: Daemon, replayed: PreTrainedModel) -> None:
    """The copies were waiting, and are called off on the device."""
    with unharmed(gpu_daemon), gpu_daemon.prepare_refit(replayed) as prepared:
        load_values(replayed, 10)
        assert ring_of(prepared) is not None
        prepared.abort()


def test_what_comes_too_late_is_an_ordinary_refit(gpu_daemon: Daemon, replayed: PreTrainedModel) -> None:
    """The daemon goes on with the old weights after `hold_seconds`, and a late bell starts nothing."""
    before = gpu_daemon.digest("full").digest
    with gpu_daemon.prepare_refit(replayed, hold_seconds=0.1) as prepared:
        until(lambda: gpu_daemon.status().state is EngineState.READY, "the gate open again")
        load_values(replayed, 11)
        ring_alone(prepared)
        assert gpu_daemon.digest("full").digest == before
        prepared.refit()
    assert gpu_daemon.digest("full").digest == digest_of(gpu_daemon, replayed)


def test_a_part_is_prepared_like_the_whole(gpu_daemon: Daemon, replayed: PreTrainedModel) -> None:
    names = ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"]
    with torch.no_grad():
        for name in names:
            replayed.get_parameter(name).mul_(0.5)
    gpu_daemon.refit(replayed, only=names)
    with torch.no_grad():
        for name in names:
            replayed.get_parameter(name).mul_(0.5)
    with gpu_daemon.prepare_refit(replayed, only=names) as prepared:
        assert ring_of(prepared) is not None
        prepared.refit()
    assert prepared.report().partial
    assert gpu_daemon.digest("full").digest == digest_of(gpu_daemon, replayed)


def test_requests_go_on_where_they_stood(gpu_daemon: Daemon, replayed: PreTrainedModel) -> None:
    """20 prepared refits with `keep` under load: every stream ends, its runs of versions cover its tokens."""
    done: list[object] = []

    def load() -> None:
        for sample in gpu_daemon.generate([PROMPT] * 8, Sampling(max_tokens=400, ignore_eos=True)):
            assert sum(run.count for run in sample.versions) == len(sample.token_ids) == 400
            assert torch.isfinite(torch.from_numpy(sample.logprobs)).all()
            done.append(sample)

    thread = threading.Thread(target=load)
    thread.start()
    for round_ in range(20):
        with gpu_daemon.prepare_refit(replayed, policy="keep") as prepared:
            load_values(replayed, round_ % 2)
            prepared.refit()
    thread.join()
    assert len(done) == 8


def test_many_leave_memory_and_descriptors_flat(gpu_process: DaemonProcess, replayed: PreTrainedModel) -> None:
    """Refitted and aborted by turns."""
    processes = [psutil.Process(pid) for pid in (os.getpid(), gpu_process.process.pid, *gpu_process.engine_pids())]

    def usage() -> tuple[int, int]:
        return torch.cuda.mem_get_info()[0], sum(process.num_fds() for process in processes)

    with gpu_process.connect() as daemon:
        daemon.acquire_writer(takeover=True)
        for round_ in range(MANY):
            with daemon.prepare_refit(replayed) as prepared:
                if round_ % 2:
                    prepared.refit()
                else:
                    prepared.abort()
            if round_ == FLAT_AFTER:
                free_bytes, descriptors = usage()
        assert usage()[0] >= free_bytes
        assert usage()[1] <= descriptors


def mapped_bells(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("refit-bell")


def session_with_a_bell(process: DaemonProcess) -> None:
    with process.connect() as daemon:
        daemon.acquire_writer(takeover=True)
        model = share_parameters(trainer_model(1))
        daemon.refit(model)
        with daemon.prepare_refit(model) as prepared:
            assert ring_of(prepared) is not None
            # Busy: the stream rings, so that the bell was registered with the driver.
            torch.cuda._sleep(1_000_000)
            prepared.refit()
        daemon.release_writer()


def test_bells_go_with_their_sessions(gpu_process: DaemonProcess) -> None:
    """Each session has a source and a bell of its own: nothing of them stays mapped or open, in any process."""
    processes = [psutil.Process(pid) for pid in (os.getpid(), gpu_process.process.pid, *gpu_process.engine_pids())]

    def usage() -> tuple[int, int]:
        gc.collect()
        return sum(mapped_bells(each.pid) for each in processes), sum(each.num_fds() for each in processes)

    for round_ in range(MANY_SESSIONS):
        session_with_a_bell(gpu_process)
        if round_ == FLAT_AFTER:
            bells, descriptors = usage()
    until(lambda: usage()[0] <= bells, "the last bell to be unmapped")
    until(lambda: usage()[1] <= descriptors, "the last descriptor to be closed")


def preparing_trainer(connection: Connection, endpoint: str) -> None:
    """Prepares a refit that it will not live to see."""
    with Daemon.connect(endpoint, client="peer") as daemon:
        daemon.acquire_writer(takeover=True)
        model = share_parameters(trainer_model(1))
        daemon.refit(model)
        connection.send("refitted")
        connection.recv()
        with daemon.prepare_refit(model, hold_seconds=60) as prepared:
            connection.send("prepared")
            connection.recv()
            torch.cuda._sleep(LONG_CYCLES)
            connection.send("refitting")
            prepared.refit()


@contextmanager
def prepared_elsewhere(process: DaemonProcess) -> Iterator[tuple[Daemon, Peer, str]]:
    """A trainer that has prepared, and the digest of the weights that are served meanwhile."""
    with process.connect("looks on") as daemon, peer(preparing_trainer, process.endpoint) as trainer:
        assert trainer.answer() == "refitted"
        digest = daemon.digest("full").digest
        assert trainer.ask("prepare") == "prepared"
        yield daemon, trainer, digest


@pytest.mark.parametrize("when", ["prepared", "its stream is on the way to the bell"])
def test_a_killed_trainer_has_written_nothing(
    gpu_process: DaemonProcess, gpu_model: PreTrainedModel, when: str
) -> None:
    """The engine serves what it did, and the next trainer refits."""
    with prepared_elsewhere(gpu_process) as (daemon, trainer, digest):
        if when != "prepared":
            assert trainer.ask("refit") == "refitting"
        trainer.kill()
        until(lambda: daemon.status().state is EngineState.READY, "the gate open again")
        assert daemon.digest("full").digest == digest
        load_values(gpu_model, 7)
        daemon.refit(gpu_model)
        with daemon.prepare_refit(gpu_model) as prepared:
            load_values(gpu_model, 12)
            prepared.refit()
        assert daemon.digest("full").digest == digest_of(daemon, gpu_model)
