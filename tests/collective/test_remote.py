"""A trainer on another machine: a session over TCP, weights by broadcast, and a daemon that keeps no weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq.auth
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.states import EngineState
from refit_trainer import CurveKeys, Daemon, DaemonUnreachable, RefitdError
from refitd.curve import write_keys
from tests.canary import unharmed
from tests.cases.test_torn import wait_for
from tests.cases.test_updates import tensors_of
from tests.conftest import GREEDY, PROMPT
from tests.daemon_process import DaemonProcess, ended, start_daemon
from tests.ports import reserved_port
from tests.trainers import specs_of

SMALL_PIECES = 16 << 10


@pytest.fixture(scope="module")
def remote(model_path: Path, short_directory: Path) -> Iterator[DaemonProcess]:
    """A daemon of this module's own, reached over TCP only."""
    directory = short_directory / "remote"
    public, secret = write_keys(directory / "server", "daemon")
    own_public, own_secret = write_keys(directory / "clients", "trainer")
    keys = CurveKeys(zmq.auth.load_certificate(public)[0], *zmq.auth.load_certificate(own_secret))
    own_secret.unlink()
    settings = (f"server.curve_secret_key={secret}", f"server.curve_clients={own_public.parent}")
    with reserved_port() as port:
        daemon = start_daemon(model_path, directory, *settings, endpoint=f"tcp://127.0.0.1:{port}", curve=keys)
        with ended(daemon):
            daemon.wait_ready()
            yield daemon


@pytest.fixture
def daemon(remote: DaemonProcess) -> Iterator[Daemon]:
    with remote.connect() as connected:
        yield connected


def test_a_client_with_keys_uses_it_and_others_do_not_reach_it(
    daemon: Daemon, remote: DaemonProcess, fresh_sample: tuple[list[int], list[float]], model: PreTrainedModel
) -> None:
    """It generates and tells its status; memory cannot be lent over a network, and a refit says so."""
    with unharmed(daemon):
        assert daemon.status().version == 0
        sample = daemon.generate_one(PROMPT, GREEDY)
        assert (sample.token_ids.tolist(), sample.logprobs.tolist()) == fresh_sample
        for weights in (model, tensors_of(1)):
            with pytest.raises(RefitdError, match="pid") as refused:
                daemon.refit(weights)
            assert refused.value.code is ErrorCode.INVALID_DESCRIPTOR
    with pytest.raises(DaemonUnreachable):
        Daemon.connect(remote.endpoint, timeout_seconds=2.0)


def failing(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    for index, named in enumerate(tensors_of(1).items()):
        if index == count:
            raise RuntimeError("the trainer's own bug")
        yield named


def test_a_session_without_local_memory_refits(daemon: Daemon) -> None:
    """Broadcasts work, and both sides agree on the digest."""
    with daemon.collective() as group:
        for seed in (1, 0):
            report = group.refit(tensors_of(seed))
            assert daemon.generate_one(PROMPT, GREEDY).version == report.version
            assert daemon.verify(tensors_of(seed), full=True)


def test_a_trainer_that_fails_before_the_first_broadcast_changes_nothing(daemon: Daemon) -> None:
    with daemon.collective(bucket_bytes=SMALL_PIECES) as group:
        version = group.refit(tensors_of(0)).version
        with pytest.raises(RuntimeError, match="own bug"):
            group.refit(failing(0), specs_of())
        assert daemon.status().state is EngineState.READY
        assert group.refit(tensors_of(0)).version == version + 1


def test_a_trainer_that_fails_in_the_middle_leaves_torn_weights_until_a_full_refit(daemon: Daemon) -> None:
    """Nothing is generated with them; the next trainer's group mends them."""
    with daemon.collective(bucket_bytes=SMALL_PIECES) as group:
        group.refit(tensors_of(0))
        with pytest.raises(RuntimeError, match="own bug"):
            group.refit(failing(12), specs_of())
    assert wait_for(daemon, EngineState.TORN, EngineState.READY) is EngineState.TORN
    with pytest.raises(RefitdError) as refused:
        daemon.generate_one(PROMPT, GREEDY)
    assert refused.value.code is ErrorCode.TORN
    with daemon.collective() as group:
        group.refit(tensors_of(0))
    assert daemon.verify(tensors_of(0), full=True)


def test_a_daemon_that_dies_while_the_trainer_broadcasts_ends_its_wait(remote: DaemonProcess) -> None:
    """The last test of this daemon: the trainer gets an error in bounded time, not a hang."""
    with remote.connect() as daemon, daemon.collective(bucket_bytes=SMALL_PIECES, timeout_seconds=20) as group:
        group.refit(tensors_of(0))

        def killing() -> Iterator[tuple[str, torch.Tensor]]:
            for index, named in enumerate(tensors_of(1).items()):
                if index == 12:
                    for pid in [remote.process.pid, *remote.engine_pids()]:
                        os.kill(pid, signal.SIGKILL)
                    remote.process.wait()
                yield named

        with pytest.raises(RefitdError):
            group.refit(killing(), specs_of())
