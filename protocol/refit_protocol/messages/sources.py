"""Memory that a trainer lends, and groups that it broadcasts in: what weights come from."""

from __future__ import annotations

from typing import Literal

from refit_protocol.messages.kinds import Command, Detail, Fact, PlanMode, Record, RefitPath
from refit_protocol.rendezvous import GroupBackend
from refit_protocol.tensors import MemfdSegment, Segment, SourceTensor

__all__ = [
    "CloseSource",
    "CollectiveJoined",
    "GroupMember",
    "JoinCollective",
    "OpenSource",
    "SourceClosed",
    "SourceOpened",
    "UnplannedTensor",
]


class GroupMember(Record, frozen=True, kw_only=True):
    """One rank of a trainer whose ranks make up one source; `group` is a secret of theirs, new for every source."""

    group: str
    rank: int
    world_size: int


class OpenSource(Command, frozen=True, kw_only=True):
    """Exports trainer memory once.

    `inplace`: `tensors` are the parameters themselves. `bucket`: the segments are staging buckets, `tensors` is empty.
    With `member` it is what one rank holds, and answered when all ranks, each in a session of its own, have sent
    theirs; one of them has to be the writer, and all give its epoch. `deadline_seconds` bounds the wait for the others.
    `bell` is what starts a prepared refit from this memory, and releases commits: see `refit_protocol.bell`. With
    `stand_by` one stands by for this trainer whenever the engine has nothing to do, where that saves it something.
    """

    epoch: int
    kind: Literal["inplace", "bucket"]
    segments: list[Segment]
    tensors: list[SourceTensor] = []
    plan: PlanMode | None = None
    member: GroupMember | None = None
    bell: MemfdSegment | None = None
    stand_by: bool = False
    deadline_seconds: float | None = None


class UnplannedTensor(Detail, frozen=True, kw_only=True):
    name: str
    why: str


class SourceOpened(Fact, frozen=True, kw_only=True):
    """`release`: whether commits from it may wait for a word of its bell. `workers`: how many have a line there."""

    source: int
    path: RefitPath
    tensors: int
    size_bytes: int
    unplanned: list[UnplannedTensor]
    release: bool = False
    workers: int = 1


class CloseSource(Command, frozen=True, kw_only=True):
    epoch: int
    source: int


class SourceClosed(Fact, frozen=True, kw_only=True):
    source: int


class JoinCollective(Command, frozen=True, kw_only=True):
    """Makes the engine's workers join the group that a trainer hosts at `address` and `port`, as a source of refits.

    Worker i becomes rank `first_rank + i` of `world_size`; rank 0, the host, broadcasts.
    """

    epoch: int
    address: str
    port: int
    world_size: int
    first_rank: int = 1
    timeout_seconds: float = 60.0
    plan: PlanMode | None = None


class CollectiveJoined(Fact, frozen=True, kw_only=True):
    """All ranks are there, and a first broadcast has come through. `bucket_bytes` and `backend` are the host's."""

    source: int
    ranks: list[int]
    backend: GroupBackend
    bucket_bytes: int


Commands = OpenSource | CloseSource | JoinCollective
Facts = SourceOpened | SourceClosed | CollectiveJoined
