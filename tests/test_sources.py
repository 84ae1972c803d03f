"""The room that open sources share; workers answer when the test says so."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import OpenSource, SourceOpened
from refit_protocol.tensors import MemfdSegment
from refitd.commit import Commit
from refitd.config import Config
from refitd.gate import Gate
from refitd.running import Running
from refitd.sessions import Session
from refitd.sources import Sources
from refitd.standing import StandBy
from refitd.writer import Writer

PID = 7
LIMIT = 3


class Workers:
    """One that opens whatever it is asked to, or refuses, once it may answer."""

    info = object()

    def __init__(self) -> None:
        self.refusal: ProtocolError | None = None
        self.may_answer = asyncio.Event()

    async def call_workers(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        await self.may_answer.wait()
        if self.refusal is not None:
            raise self.refusal
        return [{"path": "plan", "bytes": 0, "loader_tensors": [], "release": False}]


class Room:
    """Sources for a session that is the writer."""

    def __init__(self) -> None:
        self.workers: Any = Workers()
        config, writer = Config(model="m", server={"max_open_segments": LIMIT}), Writer(1)
        gate, ids = Gate(1.0, 1), itertools.count(1)
        commit = Commit(config.refit, self.workers, gate)
        standing = StandBy(config.refit, self.workers, gate, commit, Running(), ids)
        self.session = Session("token", "client", PID, 60.0, b"")
        writer.acquire(self.session, takeover=False)
        self.sources = Sources(config, self.workers, commit, writer, standing, ids, asyncio.ensure_future)  # type: ignore[arg-type]

    def open(self, segments: int) -> Coroutine[Any, Any, SourceOpened]:
        lent = [MemfdSegment(pid=PID, fd=fd, inode=fd, size_bytes=64) for fd in range(1, 1 + segments)]
        return self.sources.open_alone(self.session, OpenSource(epoch=1, kind="bucket", segments=lent))


def test_sources_that_are_opened_at_the_same_time_share_the_room() -> None:
    """The second finds only what the first has left, although no worker has answered yet."""

    async def run() -> list[Any]:
        room = Room()

        async def answer() -> None:
            room.workers.may_answer.set()

        # Begun in this order: both have asked when the workers answer.
        return await asyncio.gather(room.open(2), room.open(2), answer(), return_exceptions=True)

    first, second, _ = asyncio.run(run())
    assert isinstance(first, SourceOpened)
    assert isinstance(second, ProtocolError)
    assert second.code is ErrorCode.LIMIT_EXCEEDED


def test_a_source_that_could_not_be_opened_takes_no_room() -> None:
    async def run() -> SourceOpened:
        room = Room()
        room.workers.may_answer.set()
        room.workers.refusal = ProtocolError(ErrorCode.MEMORY_UNAVAILABLE, "it is gone")
        await asyncio.gather(room.open(LIMIT), return_exceptions=True)
        room.workers.refusal = None
        return await room.open(LIMIT)

    assert asyncio.run(run()).source == 2
