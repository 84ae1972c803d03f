"""Trainers of several ranks. Each rank lends its own memory in a session of its own, and what all of them ask for is
done once, when all have asked: opening the source that they make up together, and every commit of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import CommitRefit, GroupMember, OpenSource, RefitCommitted, RefitHeld, SourceOpened
from refit_protocol.shards import check_parts
from refit_protocol.states import GROUP_TRANSITIONS, GroupEvent, GroupState, step
from refit_protocol.tensors import Segment, SourceTensor
from refitd.sessions import Session

MAX_RANKS = 4096
MAX_GROUPS = 64
MAX_NAME = 128

Run = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
Committed = RefitCommitted | RefitHeld

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Gathering(Generic[_Item, _Result]):
    """What the ranks bring, and the one outcome that all of them wait for."""

    def __init__(self, world_size: int, wait_seconds: float, on_late: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.items: dict[int, _Item] = {}
        self._world_size = world_size
        self._outcome: asyncio.Future[_Result] = loop.create_future()
        self._late = loop.call_later(wait_seconds, on_late)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank not in self.items]

    def bring(self, rank: int, item: _Item) -> None:
        self.items[rank] = item
        if not self.missing:
            self._late.cancel()

    async def result(self) -> _Result:
        return await asyncio.shield(self._outcome)

    async def act(self, work: Awaitable[_Result]) -> None:
        """To be called once, when nothing is missing. What `work` raises is every rank's error."""
        try:
            result = await work
        except BaseException as error:
            self.fail(error)
            raise
        if not self._outcome.done():
            self._outcome.set_result(result)

    def fail(self, error: BaseException) -> None:
        self._late.cancel()
        if not self._outcome.done():
            self._outcome.set_exception(error)
            # Whoever waited may be gone.
            self._outcome.exception()


class Group:
    """The ranks of one source, from the first that comes until it is dissolved."""

    def __init__(self, member: GroupMember, wait_seconds: float, run: Run) -> None:
        self.state = GroupState.GATHERING
        self.sessions: dict[int, Session] = {}
        self.failure: ProtocolError | None = None
        self._world_size = member.world_size
        self._run = run
        self._joining: Gathering[OpenSource, SourceOpened] = Gathering(
            self._world_size, wait_seconds, lambda: self.dissolve(_late(self._joining.missing, "opened its part"))
        )
        self._commit: Gathering[CommitRefit, Committed] | None = None

    async def join(
        self,
        session: Session,
        body: OpenSource,
        open_all: Callable[[Mapping[int, OpenSource]], Awaitable[SourceOpened]],
    ) -> SourceOpened:
        """Returns when all ranks have joined and the workers have mapped the memory of all. What one rank does wrong
        dissolves the group: it cannot become complete any more."""
        assert body.member is not None
        if self.failure is not None:
            raise self.failure
        try:
            self._check_joins(session, body.member)
            self._step(GroupEvent.RANK_JOINED)
        except ProtocolError as error:
            self.dissolve(error)
            raise
        self.sessions[body.member.rank] = session
        self._joining.bring(body.member.rank, body)
        if not self._joining.missing:
            self._step(GroupEvent.ALL_JOINED)
            self._run(self._joining.act(self._open(open_all)))
        return await self._joining.result()

    async def _open(self, open_all: Callable[[Mapping[int, OpenSource]], Awaitable[SourceOpened]]) -> SourceOpened:
        try:
            bodies = self._joining.items
            check_parts({rank: body.tensors for rank, body in bodies.items()})
            opened = await open_all(bodies)
        except ProtocolError as error:
            self.dissolve(error)
            raise
        if self.failure is not None:
            raise self.failure
        self._step(GroupEvent.MAPPED)
        return opened

    async def commit(
        self,
        session: Session,
        body: CommitRefit,
        wait_seconds: float,
        commit: Callable[[CommitRefit], Awaitable[Committed]],
    ) -> Committed:
        """Returns when all ranks have announced the same commit and it has been done, or raises for all alike."""
        if self.failure is not None:
            raise self.failure
        rank = self._rank_of(session)
        if self.state is GroupState.COMMITTING or (self._commit is not None and rank in self._commit.items):
            raise ProtocolError(ErrorCode.REFIT_IN_PROGRESS, f"rank {rank} has announced a commit: wait for its end")
        self._step(GroupEvent.RANK_ANNOUNCED)
        if self._commit is None:
            self._commit = Gathering(self._world_size, wait_seconds, self._commit_is_late)
        announced = self._commit
        self._check_agrees(rank, body, announced.items)
        announced.bring(rank, body)
        if not announced.missing:
            self._step(GroupEvent.ALL_ANNOUNCED)
            self._run(announced.act(self._committed(commit(body))))
        return await announced.result()

    async def _committed(self, work: Awaitable[Committed]) -> Committed:
        try:
            return await work
        finally:
            self._commit = None
            if self.state is GroupState.COMMITTING:
                self._step(GroupEvent.COMMIT_ENDED)

    def dissolve(self, error: ProtocolError) -> None:
        """Every rank that waits gets `error`, and so does whoever comes; a commit that is being done goes on."""
        if self.state is GroupState.DISSOLVED:
            return
        committing = self.state is GroupState.COMMITTING
        self._step(GroupEvent.DISSOLVED)
        self.failure = error
        self._joining.fail(error)
        if self._commit is not None and not committing:
            self._commit.fail(error)

    def has(self, session: Session) -> bool:
        return session in self.sessions.values()

    def left(self, session: Session, why: str) -> None:
        rank = self._rank_of(session)
        self.dissolve(
            ProtocolError(ErrorCode.GROUP_INCOMPLETE, f"rank {rank} left: {why}; open the source again", missing=[rank])
        )

    def _check_joins(self, session: Session, member: GroupMember) -> None:
        if member.world_size != self._world_size:
            raise _mismatch(f"rank {member.rank} says {member.world_size} ranks, others {self._world_size}")
        if not 0 <= member.rank < self._world_size:
            raise _mismatch(f"there is no rank {member.rank} among {self._world_size}")
        if member.rank in self.sessions:
            raise _mismatch(f"rank {member.rank} has come twice")
        if self.has(session):
            raise _mismatch(f"rank {member.rank} uses the session of rank {self._rank_of(session)}: open one for each")

    def _check_agrees(self, rank: int, body: CommitRefit, others: Mapping[int, CommitRefit]) -> None:
        for other, its_body in others.items():
            if its_body != body:
                error = _mismatch(f"ranks {other} and {rank} ask for different commits")
                self._withdraw(error)
                raise error

    def _commit_is_late(self) -> None:
        assert self._commit is not None
        self._withdraw(_late(self._commit.missing, "announced the commit"))

    def _withdraw(self, error: ProtocolError) -> None:
        """The source stays open, nothing was written."""
        assert self._commit is not None
        self._step(GroupEvent.NOT_AGREED)
        self._commit.fail(error)
        self._commit = None

    def _rank_of(self, session: Session) -> int:
        for rank, member in self.sessions.items():
            if member is session:
                return rank
        raise ProtocolError(ErrorCode.UNKNOWN_SOURCE, "this session is no rank of the source's trainer")

    def _step(self, event: GroupEvent) -> None:
        self.state = step(GROUP_TRANSITIONS, self.state, event)


class Groups:
    """Those of the present writer's epoch. Dissolved ones are remembered, so that a late rank is not left waiting."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._groups: dict[tuple[int, str], Group] = {}

    def group_for(self, body: OpenSource, wait_seconds: float) -> Group:
        """The group that a rank names, made for the first one. Raises `group_mismatch` for what cannot be one."""
        assert body.member is not None
        member = body.member
        if not 0 < member.world_size <= MAX_RANKS or not 0 < len(member.group) <= MAX_NAME:
            raise _mismatch(
                f"a group has 1 to {MAX_RANKS} ranks and a name of 1 to {MAX_NAME} characters, "
                f"not {member.world_size} and {len(member.group)}"
            )
        key = body.epoch, member.group
        group = self._groups.get(key)
        if group is None:
            self._make_room()
            group = self._groups[key] = Group(member, wait_seconds, self._run)
        return group

    def left(self, session: Session, why: str) -> None:
        for group in self._groups.values():
            if group.has(session):
                group.left(session, why)

    def dissolve_all(self, error: ProtocolError) -> None:
        """Because their writer is the writer no more."""
        for group in self._groups.values():
            group.dissolve(error)
        self._groups.clear()

    def _make_room(self) -> None:
        dissolved = [key for key, group in self._groups.items() if group.state is GroupState.DISSOLVED]
        if len(self._groups) < MAX_GROUPS:
            return
        if not dissolved:
            raise ProtocolError(ErrorCode.LIMIT_EXCEEDED, f"{len(self._groups)} groups, the limit", limit=MAX_GROUPS)
        del self._groups[dissolved[0]]


def merged(ranks: Mapping[int, OpenSource]) -> OpenSource:
    """The source that the ranks make up: the memory of all, and every tensor as often as there are parts of it."""
    segments: list[Segment] = []
    tensors: list[SourceTensor] = []
    for _, body in sorted(ranks.items()):
        first = len(segments)
        segments += body.segments
        tensors += [msgspec.structs.replace(tensor, segment=first + tensor.segment) for tensor in body.tensors]
    bodies = list(ranks.values())
    if any(body.plan != bodies[0].plan for body in bodies):
        raise _mismatch("the ranks differ about the plan")
    return OpenSource(epoch=bodies[0].epoch, kind="inplace", segments=segments, tensors=tensors, plan=bodies[0].plan)


def _late(missing: list[int], what: str) -> ProtocolError:
    ranks = ", ".join(str(rank) for rank in missing[:10])
    message = f"not every rank {what} in time: missing {ranks}"
    return ProtocolError(ErrorCode.GROUP_INCOMPLETE, message, missing=missing[:100])


def _mismatch(message: str) -> ProtocolError:
    return ProtocolError(ErrorCode.GROUP_MISMATCH, message)
