"""A daemon that hangs, or was stopped, while somebody waits for it: it answers nothing, and the connection stays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from refit_protocol.messages import AcquireWriter, GetManifest, Manifest, ReleaseWriter, ReloadWeights, WriterAcquired
from refit_trainer import AsyncDaemon, DaemonUnreachable, connection
from tests.trainer.peer import PATIENCE_SECONDS, Asked, Peer, endpoint_in, running


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """Its lease alone would let a client wait for longer than a test may take."""
    monkeypatch.setattr(connection, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(connection, "_SILENCE_SECONDS", 0.5)
    with running(Peer(endpoint_in(tmp_path), lease_seconds=3000.0, heartbeat_seconds=1000.0)) as started:
        yield started


async def asked_for(peer: Peer, kind: type[GetManifest | ReleaseWriter | ReloadWeights]) -> Asked:
    return await asyncio.to_thread(peer.next, kind)


def test_a_request_to_a_daemon_that_falls_silent_ends(peer: Peer) -> None:
    """With an error that says what is the matter, long before its own deadline."""

    async def scenario() -> None:
        async with AsyncDaemon.connect(peer.endpoint, timeout_seconds=600) as client:
            asking = asyncio.create_task(client.manifest())
            await asked_for(peer, GetManifest)
            peer.answers_heartbeats = False
            with pytest.raises(DaemonUnreachable, match=r"silent for 0\.5 s.* outcome unknown"):
                await asking

    asyncio.run(scenario())


def test_an_interrupted_refit_does_not_wait_for_a_daemon_that_is_silent(peer: Peer) -> None:
    """It has to be told to end the refit, and may take its time for it, but only while it lives."""

    async def scenario() -> None:
        async with AsyncDaemon.connect(peer.endpoint, timeout_seconds=600) as client:
            refit = asyncio.create_task(client.reload("/weights"))
            acquiring = await asyncio.to_thread(peer.next, AcquireWriter)
            acquiring.reply(WriterAcquired(epoch=1))
            await asked_for(peer, ReloadWeights)
            peer.answers_heartbeats = False
            refit.cancel()
            await asked_for(peer, ReleaseWriter)
            with pytest.raises(asyncio.CancelledError):
                await refit

    asyncio.run(scenario())


def test_a_daemon_that_answers_heartbeats_may_take_its_time(peer: Peer) -> None:
    """It is asked more often than the lease wants, as long as somebody waits for it."""

    async def scenario() -> None:
        async with AsyncDaemon.connect(peer.endpoint, timeout_seconds=600) as client:
            asking = asyncio.create_task(client.manifest())
            asked = await asked_for(peer, GetManifest)
            for _ in range(3):
                await asyncio.to_thread(peer.heartbeats.get, timeout=PATIENCE_SECONDS)
            asked.reply(Manifest(tensors=[]))
            assert await asking == Manifest(tensors=[])

    asyncio.run(scenario())
