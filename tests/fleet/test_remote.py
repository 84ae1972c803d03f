"""A fleet with a member over TCP: it generates like the others, and is not refitted from memory it cannot see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import zmq.auth

from refit_trainer import CurveKeys, Fleet, MemberState, NotShareable, Sampling, share_parameters
from refitd.curve import write_keys
from tests.fleet.conftest import directory_in
from tests.server.small_daemon import SmallDaemon, small_daemon


@pytest.fixture
def keys(tmp_path: Path) -> CurveKeys:
    """Of a daemon, and of the one client on its list."""
    write_keys(tmp_path / "server", "daemon")
    write_keys(tmp_path / "client", "trainer")
    (tmp_path / "clients").mkdir()
    (tmp_path / "client" / "trainer.key").rename(tmp_path / "clients" / "trainer.key")
    server_public, _ = zmq.auth.load_certificate(tmp_path / "server" / "daemon.key_secret")
    public, secret = zmq.auth.load_certificate(tmp_path / "client" / "trainer.key_secret")
    assert secret is not None
    return CurveKeys(server_public, public, secret)


@pytest.fixture
def daemons(tmp_path: Path, keys: CurveKeys) -> Iterator[list[SmallDaemon]]:
    """A local one, and one over TCP."""
    settings = {
        "curve_secret_key": tmp_path / "server" / "daemon.key_secret",
        "curve_clients": tmp_path / "clients",
    }
    with ExitStack() as stack:
        local = stack.enter_context(small_daemon(directory_in(tmp_path, 0)))
        remote = stack.enter_context(small_daemon(directory_in(tmp_path, 1), tcp=True, **settings))
        yield [local, remote]


def test_a_member_over_tcp_takes_its_part_of_a_batch(daemons: list[SmallDaemon], keys: CurveKeys) -> None:
    local, remote = daemons
    with Fleet.connect([local.endpoint, remote.endpoint], curve={remote.endpoint: keys}) as fleet:
        samples = fleet.generate([[number, 5] for number in range(12)], Sampling(max_tokens=4))
        local.until(lambda: len(local.engine.running) + len(remote.engine.running) == 12)
        assert remote.engine.running
        for daemon in daemons:
            daemon.step(4)
        assert len(list(samples)) == 12


def test_a_member_over_tcp_is_not_refitted_through_the_fleet(daemons: list[SmallDaemon], keys: CurveKeys) -> None:
    """Said at once, with what there is instead; whoever left it out goes on with the others."""
    local, remote = daemons
    with Fleet.connect([local.endpoint, remote.endpoint], curve={remote.endpoint: keys}) as fleet:
        with pytest.raises(NotShareable, match="collective"):
            fleet.refit(share_parameters(torch.nn.Linear(2, 2)))
        assert local.writer.session is None


def test_a_member_that_refuses_our_keys_is_down(daemons: list[SmallDaemon], keys: CurveKeys) -> None:
    """With the reason; the others are a fleet."""
    local, remote = daemons
    strange = CurveKeys(keys.server_public, *zmq.curve_keypair())
    with Fleet.connect([local.endpoint, remote.endpoint], 2.0, curve={remote.endpoint: strange}) as fleet:
        states = {member.endpoint: member for member in fleet.status().members}
        assert states[local.endpoint].state is MemberState.SERVING
        assert states[remote.endpoint].state is MemberState.DOWN
        assert "handshake" in str(states[remote.endpoint].error)
