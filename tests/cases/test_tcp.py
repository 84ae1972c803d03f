"""Case D over the network: a whole daemon behind a TCP socket with CURVE keys."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq.auth
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_trainer import Daemon, DaemonUnreachable, RefitdError
from refit_trainer.link import CurveKeys
from refitd.curve import write_keys
from tests.canary import unharmed
from tests.conftest import GREEDY, PROMPT
from tests.daemon_process import ended, start_daemon
from tests.trainers import tensors_of

AFTER_THREE_BUCKETS = 12


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_the_whole_daemon_over_tcp(
    model_path: Path, short_directory: Path, fresh_sample: tuple[list[int], list[float]], model: PreTrainedModel
) -> None:
    """With keys it generates and tells its status; memory cannot be lent over a network, and a refit says so."""
    directory = short_directory / "tcp"
    curve = make_keys(directory)
    with ended(
        start_daemon(
            model_path,
            directory,
            f"server.curve_secret_key={directory}/daemon.key_secret",
            f"server.curve_clients={directory}/clients",
            endpoint=f"tcp://127.0.0.1:{free_port()}",
            curve=curve,
        )
    ) as process:
        process.wait_ready()
        with process.connect() as daemon, unharmed(daemon):
            assert daemon.status().version == 0
            sample = daemon.generate_one(PROMPT, GREEDY)
            assert (sample.token_ids.tolist(), sample.logprobs.tolist()) == fresh_sample
            with pytest.raises(RefitdError, match="pid") as shared:
                daemon.refit(model)
            assert shared.value.code is ErrorCode.INVALID_DESCRIPTOR
            with pytest.raises(RefitdError, match="pid") as staged:
                daemon.refit(dict(tensors_of(1)))
            assert staged.value.code is ErrorCode.INVALID_DESCRIPTOR
        with pytest.raises(DaemonUnreachable):
            Daemon.connect(process.endpoint, timeout_seconds=2.0)


def make_keys(directory: Path) -> CurveKeys:
    """A pair for the daemon, and one client's on its list."""
    clients = directory / "clients"
    clients.mkdir(parents=True)
    write_keys(directory, "daemon")
    write_keys(directory, "trainer")
    (directory / "trainer.key").rename(clients / "trainer.key")
    daemon_public, _ = zmq.auth.load_certificate(directory / "daemon.key_secret")
    public, secret = zmq.auth.load_certificate(directory / "trainer.key_secret")
    assert secret is not None
    return CurveKeys(daemon_public, public, secret)
