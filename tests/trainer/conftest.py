"""A peer that does what it is told, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from refit_trainer import Daemon
from tests.trainer.peer import PATIENCE_SECONDS, Peer, endpoint_in, running


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with running(Peer(endpoint_in(tmp_path))) as started:
        yield started


@pytest.fixture
def client(peer: Peer) -> Iterator[Daemon]:
    with Daemon.connect(peer.endpoint, timeout_seconds=PATIENCE_SECONDS) as connected:
        yield connected
