"""What the reference's worker waits for, and how long, against a peer that answers as a daemon in that state does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import Generate, GetStatus, LoadModel, ModelLoaded
from refit_trainer import RefitdError
from refit_trainer.generation_worker import GenerationWorker
from tests.trainer.peer import MODEL, STATUS, Asked, Peer, endpoint_in, running

WEEK = 7 * 86400.0


class Daemon:
    """Answers as a daemon that serves `version`; refuses to generate, but keeps the request."""

    def __init__(self) -> None:
        self.version = 3
        self.looks = 0
        self.asked: list[Generate] = []

    def answer(self, asked: Asked) -> None:
        match asked.body:
            case LoadModel():
                asked.reply(ModelLoaded(model=MODEL, load_seconds=0.0))
            case GetStatus():
                self.looks += 1
                asked.reply(msgspec.structs.replace(STATUS, version=self.version, epoch=asked.peer.epoch))
            case Generate():
                self.asked.append(asked.body)
                asked.fail(ErrorCode.TOO_MANY_REQUESTS)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def peer(daemon: Daemon, tmp_path: Path) -> Iterator[Peer]:
    with running(Peer(endpoint_in(tmp_path), answer=daemon.answer)) as started:
        yield started


@pytest.mark.parametrize(("config", "seconds"), [({}, WEEK), ({"generation_seconds": 5}, 5.0)])
def test_rollouts_may_take_as_long_as_configured(
    peer: Peer, daemon: Daemon, config: dict[str, Any], seconds: float
) -> None:
    """By default longer than any does: the reference's worker has no limit."""
    worker = GenerationWorker({"endpoint": peer.endpoint, **config})

    async def generate() -> None:
        data = {"input_ids": torch.tensor([[5, 6]]), "input_lengths": torch.tensor([2])}
        with pytest.raises(RefitdError):
            await anext(worker.generate_async(data))
        await worker.shutdown()

    asyncio.run(generate())
    assert [command.deadline_seconds for command in daemon.asked] == [seconds]


def test_restarted_daemon_counts_anew(peer: Peer, daemon: Daemon) -> None:
    """The worker does not wait for a version above those of the old one. The weights that the new one was started with
    are no update."""
    worker = GenerationWorker({"endpoint": peer.endpoint})

    async def update() -> bool:
        waiting = asyncio.create_task(worker.update_weights_via_ipc_zmq_async())
        looks = daemon.looks
        while daemon.looks < looks + 2:  # noqa: ASYNC110 - the peer is a thread
            await asyncio.sleep(0.002)
        assert not waiting.done()
        daemon.version = 1
        updated = await waiting
        await worker.shutdown()
        return updated

    peer.stop()
    peer.epoch, daemon.version = 2, 0
    peer.start()
    peer.wait_for_hellos(2)
    assert asyncio.run(update())
