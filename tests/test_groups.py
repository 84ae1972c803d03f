"""Ranks that ask together: who waits, who is told, and what happens to a commit that has begun. No engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    CommitRefit,
    GroupMember,
    OpenSource,
    RefitCommitted,
    RefitMilliseconds,
    RefitReport,
    SourceOpened,
)
from refit_protocol.states import GroupState
from refitd.groups import MAX_GROUPS, Group, Groups, merged
from refitd.sessions import Session

LONG_SECONDS = 60.0
OPENED = SourceOpened(source=4, path="plan", tensors=0, size_bytes=0, unplanned=[])
COMMITTED = RefitCommitted(
    report=RefitReport(
        version=1,
        path="plan",
        tensors=0,
        size_bytes=0,
        partial=False,
        policy="keep",
        unplanned=[],
        digest=None,
        milliseconds=RefitMilliseconds(validate=0, gate=0, copy=0, attest=0, publish=0, total=0),
    )
)
COMMIT = CommitRefit(epoch=1, source=4)


def session(pid: int) -> Session:
    return Session(token=str(pid), client="t", pid=pid, lease_seconds=9.0, identity=b"")


def body(rank: int, world_size: int = 2, group: str = "g", **fields: Any) -> OpenSource:
    member = GroupMember(group=group, rank=rank, world_size=world_size)
    return OpenSource(epoch=1, kind="inplace", segments=[], member=member, **fields)


def run(work: Awaitable[Any]) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    assert isinstance(task, asyncio.Task)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """pytest runs it as a plain function."""

    def sync() -> None:
        asyncio.run(test())

    sync.__doc__, sync.__name__ = test.__doc__, test.__name__
    return sync


async def open_all(_ranks: Mapping[int, OpenSource]) -> SourceOpened:
    return OPENED


class Ranks:
    def __init__(self, wait_seconds: float = LONG_SECONDS) -> None:
        self.sessions = [session(1), session(2)]
        self.group = Group(GroupMember(group="g", rank=0, world_size=2), wait_seconds, run)

    def join(self, rank: int, **fields: Any) -> asyncio.Task[SourceOpened]:
        return run(self.group.join(self.sessions[rank], body(rank, **fields), open_all))

    def commit(
        self, rank: int, wait_seconds: float = LONG_SECONDS, body: CommitRefit = COMMIT, work: Any = None
    ) -> asyncio.Task[Any]:
        async def at_once(_body: CommitRefit) -> RefitCommitted:
            return COMMITTED

        return run(self.group.commit(self.sessions[rank], body, wait_seconds, work or at_once))

    async def opened(self) -> None:
        assert await asyncio.gather(self.join(0), self.join(1)) == [OPENED, OPENED]
        assert self.group.state is GroupState.OPEN


async def refusal(*tasks: asyncio.Task[Any]) -> ErrorCode:
    """The one error that all of them ended with."""
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, ProtocolError) for error in errors), errors
    (code,) = {error.code for error in errors if isinstance(error, ProtocolError)}
    return code


@on_loop
async def test_all_ranks_are_answered_together() -> None:
    """Nobody before the last; afterwards each commit again waits for all, in any order."""
    ranks = Ranks()
    first = ranks.join(1)
    await asyncio.sleep(0)
    assert not first.done()
    assert await asyncio.gather(first, ranks.join(0)) == [OPENED, OPENED]
    for order in ((0, 1), (1, 0)):
        assert await asyncio.gather(*(ranks.commit(rank) for rank in order)) == [COMMITTED, COMMITTED]
        assert ranks.group.state is GroupState.OPEN


@on_loop
async def test_late_ranks_cost_the_others_an_error_only() -> None:
    """Late with its part: the group is dissolved, the late one told at once. Late with a commit: it stays open."""
    late = Ranks(wait_seconds=0.01)
    assert await refusal(late.join(0)) is ErrorCode.GROUP_INCOMPLETE
    assert await refusal(late.join(1)) is ErrorCode.GROUP_INCOMPLETE
    ranks = Ranks()
    await ranks.opened()
    assert await refusal(ranks.commit(0, wait_seconds=0.01)) is ErrorCode.GROUP_INCOMPLETE
    assert await asyncio.gather(ranks.commit(0), ranks.commit(1)) == [COMMITTED, COMMITTED]


@on_loop
async def test_a_rank_announces_once() -> None:
    """A second commit of the same rank is refused while the first waits, and while it is done."""
    ranks = Ranks()
    await ranks.opened()
    begun, end = asyncio.Event(), asyncio.Event()

    async def until_told(_body: CommitRefit) -> RefitCommitted:
        begun.set()
        await end.wait()
        return COMMITTED

    waiting = ranks.commit(0, work=until_told)
    assert await refusal(ranks.commit(0)) is ErrorCode.REFIT_IN_PROGRESS
    other = ranks.commit(1, work=until_told)
    await begun.wait()
    assert await refusal(ranks.commit(1)) is ErrorCode.REFIT_IN_PROGRESS
    end.set()
    assert await asyncio.gather(waiting, other) == [COMMITTED, COMMITTED]


@on_loop
async def test_a_commit_that_has_begun_is_done_to_its_end() -> None:
    """A rank that leaves then takes the group along, but the others hear how the commit ended."""
    ranks = Ranks()
    await ranks.opened()

    async def leaving(_body: CommitRefit) -> RefitCommitted:
        ranks.group.left(ranks.sessions[1], "its process ended")
        return COMMITTED

    tasks = [ranks.commit(rank, work=leaving) for rank in (0, 1)]
    assert await asyncio.gather(*tasks) == [COMMITTED, COMMITTED]
    assert ranks.group.state is GroupState.DISSOLVED
    assert await refusal(ranks.commit(0)) is ErrorCode.GROUP_INCOMPLETE


@on_loop
async def test_a_commit_that_fails_fails_for_all_and_can_be_tried_again() -> None:
    """Every rank gets its error."""
    ranks = Ranks()
    await ranks.opened()

    async def refused(_body: CommitRefit) -> RefitCommitted:
        raise ProtocolError(ErrorCode.NOT_FINITE, "not finite")

    tasks = [ranks.commit(rank, work=refused) for rank in (0, 1)]
    assert await refusal(*tasks) is ErrorCode.NOT_FINITE
    assert ranks.group.state is GroupState.OPEN
    different = [ranks.commit(0), ranks.commit(1, body=CommitRefit(epoch=1, source=4, version=9))]
    assert await refusal(*different) is ErrorCode.GROUP_MISMATCH
    assert await asyncio.gather(ranks.commit(0), ranks.commit(1)) == [COMMITTED, COMMITTED]


@on_loop
async def test_a_rank_that_leaves_while_the_workers_map() -> None:
    """Nobody gets a source that its lender has already left."""
    ranks = Ranks()

    async def leaving(_ranks: Mapping[int, OpenSource]) -> SourceOpened:
        ranks.group.left(ranks.sessions[0], "its process ended")
        return OPENED

    joined = [run(ranks.group.join(ranks.sessions[rank], body(rank), leaving)) for rank in (0, 1)]
    assert await refusal(*joined) is ErrorCode.GROUP_INCOMPLETE


@on_loop
async def test_one_session_is_one_rank() -> None:
    """A session cannot stand for two, and a stranger for none."""
    ranks = Ranks()
    ranks.sessions[1] = ranks.sessions[0]
    assert await refusal(ranks.join(0), ranks.join(1)) is ErrorCode.GROUP_MISMATCH
    ranks = Ranks()
    await ranks.opened()
    ranks.sessions[0] = session(3)
    assert await refusal(ranks.commit(0)) is ErrorCode.UNKNOWN_SOURCE


@on_loop
async def test_groups_are_bounded() -> None:
    """Dissolved ones make room, those that wait do not."""
    groups = Groups(run)
    waiting = [groups.group_for(body(0, group=str(number)), LONG_SECONDS) for number in range(MAX_GROUPS)]
    with pytest.raises(ProtocolError) as refused:
        groups.group_for(body(0, group="one more"), LONG_SECONDS)
    assert refused.value.code is ErrorCode.LIMIT_EXCEEDED
    waiting[5].dissolve(ProtocolError(ErrorCode.GROUP_MISMATCH, "wrong"))
    groups.group_for(body(0, group="one more"), LONG_SECONDS)
    groups.dissolve_all(ProtocolError(ErrorCode.STALE_EPOCH, "the writer changed"))
    assert all(group.state is GroupState.DISSOLVED for group in waiting)


def test_ranks_differ_about_the_plan() -> None:
    """What decides about the source has to be the same on all ranks."""
    with pytest.raises(ProtocolError) as refused:
        merged({0: body(0, plan="require"), 1: body(1)})
    assert refused.value.code is ErrorCode.GROUP_MISMATCH
