"""Ranks of a trainer that do not fit, come late or leave: a typed error in bounded time, and nothing changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AcquireWriter,
    CloseSource,
    CommitRefit,
    Failed,
    Goodbye,
    GroupMember,
    Heartbeat,
    HeartbeatAcknowledged,
    OpenSource,
    RefitCommitted,
    Reply,
    SourceClosed,
    SourceOpened,
    WriterAcquired,
)
from refit_protocol.tensors import Segment, SourceTensor
from refit_trainer import Daemon
from tests.canary import unharmed
from tests.daemon_process import DaemonProcess
from tests.parallel.engines import Said, odd_model, said
from tests.wire import RawClient, raw_client
from tests.worker.trainers import ExportedTensors

SOON_SECONDS = 0.3
Part = dict[str, Any]

pytestmark = pytest.mark.slow


@dataclass
class Ranks:
    """Two, with a session each; the first is the writer. Rows of matrices are divided, the rest is whole on both."""

    clients: list[RawClient]
    memories: list[ExportedTensors]
    epoch: int
    group: str = "secret"
    parts: list[list[Part]] = field(default_factory=list)

    def open(self, *ranks: int, **fields: Any) -> list[Reply]:
        """Sends what these ranks hold, and returns all their answers."""
        for rank in ranks:
            self.post_open(rank, **fields)
        return self.answers(*ranks)

    def post_open(self, rank: int, world_size: int = 2, as_rank: int | None = None, **fields: Any) -> None:
        member = GroupMember(group=self.group, rank=rank if as_rank is None else as_rank, world_size=world_size)
        body = OpenSource(
            epoch=self.epoch,
            kind="inplace",
            segments=msgspec.convert([self.memories[rank].segment], list[Segment]),
            tensors=msgspec.convert(self.parts[rank], list[SourceTensor]),
            member=member,
        )
        self.clients[rank].post(msgspec.structs.replace(body, **fields))

    def commit(self, source: int, *ranks: int, **fields: Any) -> list[Reply]:
        for rank in ranks:
            self.clients[rank].post(CommitRefit(epoch=self.epoch, source=source, **fields))
        return self.answers(*ranks)

    def answers(self, *ranks: int) -> list[Reply]:
        return [self.clients[rank].receive().body for rank in ranks]

    def write(self, seed: int) -> None:
        for rank, memory in enumerate(self.memories):
            for name, tensor in held(seed, rank):
                memory.tensors[name].copy_(tensor)


def held(seed: int, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in odd_model(seed).named_parameters():
        tensor = parameter.detach()
        yield name, tensor if tensor.dim() == 1 else torch.chunk(tensor, 2)[rank]


def described(memory: ExportedTensors, rank: int) -> list[Part]:
    whole = {name: tuple(parameter.shape) for name, parameter in odd_model(0).named_parameters()}
    parts = []
    for part in memory.described:
        shape = whole[part["name"]]
        first = 0 if rank == 0 else shape[0] - part["shape"][0]
        shard = None if len(shape) == 1 else {"whole": shape, "offsets": (first, 0)}
        parts.append({**part, "shard": shard})
    return parts


@pytest.fixture
def daemon(two_ranks: DaemonProcess, fresh: Said) -> Iterator[Daemon]:
    assert fresh
    with two_ranks.connect() as connected:
        yield connected


@pytest.fixture
def ranks(two_ranks: DaemonProcess, daemon: Daemon) -> Iterator[Ranks]:
    """With the weights the engine was started on, which it serves."""
    daemon.refit(iter(odd_model(0).named_parameters()))
    daemon.release_writer()
    with ExitStack() as stack:
        clients = [stack.enter_context(raw_client(two_ranks.endpoint)) for _ in range(2)]
        for client in clients:
            client.hello(pid=os.getpid())
        epoch = clients[0].ask(AcquireWriter(), WriterAcquired).epoch
        memories = [stack.enter_context(ExportedTensors(dict(held(0, rank)))) for rank in range(2)]
        parts = [described(memory, rank) for rank, memory in enumerate(memories)]
        yield Ranks(clients, memories, epoch, parts=parts)


def codes(replies: list[Reply]) -> list[ErrorCode]:
    assert all(isinstance(reply, Failed) for reply in replies), replies
    return [reply.code for reply in replies if isinstance(reply, Failed)]


def opened(ranks: Ranks) -> int:
    first, second = ranks.open(0, 1)
    assert isinstance(first, SourceOpened), first
    assert first == second
    return first.source


def test_ranks_commit_together(daemon: Daemon, ranks: Ranks, fresh: Said) -> None:
    """One source from two ranks: both get one answer, and the engine holds every element of B, then of A."""
    source = opened(ranks)
    for seed in (1, 0):
        ranks.write(seed)
        first, second = ranks.commit(source, 1, 0, attest="full")
        assert isinstance(first, RefitCommitted)
        assert first == second
        assert daemon.verify(dict(odd_model(seed).named_parameters()), full=True)
    assert said(daemon) == fresh


def test_nothing_is_written_before_all_have_announced(daemon: Daemon, ranks: Ranks) -> None:
    """A rank that is late with its commit costs the others an error; the source stays open for the next try."""
    source = opened(ranks)
    ranks.write(1)
    with unharmed(daemon):
        late = ranks.commit(source, 0, deadline_seconds=SOON_SECONDS)
        assert codes(late) == [ErrorCode.GROUP_INCOMPLETE]
        assert late[0].details["missing"] == [1]
    assert isinstance(ranks.commit(source, 0, 1)[1], RefitCommitted)


def test_different_commits_are_refused(daemon: Daemon, ranks: Ranks) -> None:
    """Ranks that ask for different versions get an error each, and can agree afterwards."""
    source = opened(ranks)
    with unharmed(daemon):
        ranks.clients[0].post(CommitRefit(epoch=ranks.epoch, source=source, policy="abort"))
        ranks.clients[1].post(CommitRefit(epoch=ranks.epoch, source=source, policy="keep"))
        assert codes(ranks.answers(0, 1)) == [ErrorCode.GROUP_MISMATCH] * 2
    assert isinstance(ranks.commit(source, 0, 1)[0], RefitCommitted)


def test_a_missing_rank(daemon: Daemon, ranks: Ranks) -> None:
    """The one that waits is told who is missing; the other, which comes too late, gets the same at once."""
    with unharmed(daemon):
        assert codes(ranks.open(0, deadline_seconds=SOON_SECONDS)) == [ErrorCode.GROUP_INCOMPLETE]
        assert codes(ranks.open(1)) == [ErrorCode.GROUP_INCOMPLETE]
        ranks.group = "another"
    opened(ranks)


@pytest.mark.parametrize(
    "wrong",
    [{"world_size": 3}, {"as_rank": 0}, {"as_rank": 2}, {"as_rank": -1}, {"world_size": 0}],
    ids=["world size", "duplicate rank", "no such rank", "negative rank", "no ranks"],
)
def test_a_rank_that_does_not_fit_in(daemon: Daemon, ranks: Ranks, wrong: dict[str, int]) -> None:
    """Nobody waits for the deadline: a wrong second rank is refused, and so is the first that waited for it."""
    with unharmed(daemon):
        ranks.post_open(0, deadline_seconds=SOON_SECONDS)
        ranks.post_open(1, **wrong)
        waiting = ErrorCode.GROUP_INCOMPLETE if wrong == {"world_size": 0} else ErrorCode.GROUP_MISMATCH
        assert codes(ranks.answers(1, 0)) == [ErrorCode.GROUP_MISMATCH, waiting]


def wider(part: Part) -> Part:
    return {**part, "shard": {**part["shard"], "whole": (part["shard"]["whole"][0] + 2, part["shard"]["whole"][1])}}


def shifted(part: Part) -> Part:
    return {**part, "shard": {**part["shard"], "offsets": (part["shard"]["offsets"][0] - 1, 0)}}


@pytest.mark.parametrize(
    ("change", "said_to_be"),
    [
        (lambda part: {**part, "dtype": "float16"}, "dtype"),
        (wider, "shape"),
        (shifted, "overlap"),
        (lambda part: {**part, "shape": (part["shape"][0] - 1, part["shape"][1])}, "elements"),
    ],
    ids=["dtypes", "whole shapes", "overlap", "not covered"],
)
def test_parts_that_do_not_fit(daemon: Daemon, ranks: Ranks, change: Any, said_to_be: str) -> None:
    """Both ranks are told which tensor, and why."""
    matrix = next(index for index, part in enumerate(ranks.parts[1]) if part["shard"] is not None)
    ranks.parts[1][matrix] = change(ranks.parts[1][matrix])
    with unharmed(daemon):
        replies = ranks.open(0, 1)
        assert codes(replies) == [ErrorCode.GROUP_MISMATCH] * 2
        assert ranks.parts[1][matrix]["name"] in replies[0].message
        assert said_to_be in replies[0].message


def test_a_descriptor_that_cannot_be_dissolves_the_group(daemon: Daemon, ranks: Ranks) -> None:
    """A tensor outside its segment on one rank: both get the error, none waits."""
    ranks.parts[1][0] = {**ranks.parts[1][0], "offset_bytes": 1 << 40}
    with unharmed(daemon):
        ranks.post_open(0)
        ranks.post_open(1)
        assert codes(ranks.answers(1, 0)) == [ErrorCode.INVALID_DESCRIPTOR] * 2


def test_a_tensor_that_no_rank_holds(daemon: Daemon, ranks: Ranks) -> None:
    """What is missing is judged over all ranks."""
    name = ranks.parts[0][0]["name"]
    ranks.parts = [[part for part in parts if part["name"] != name] for parts in ranks.parts]
    with unharmed(daemon):
        replies = ranks.open(0, 1)
        assert codes(replies) == [ErrorCode.MANIFEST_MISMATCH] * 2
        assert replies[0].details["missing"] == [name]


def test_a_rank_that_leaves(daemon: Daemon, ranks: Ranks) -> None:
    """While the others wait for its commit: they are told at once, and the source is closed for all."""
    source = opened(ranks)
    with unharmed(daemon):
        ranks.clients[0].post(CommitRefit(epoch=ranks.epoch, source=source))
        # What is sent before is begun before.
        ranks.clients[0].ask(Heartbeat(), HeartbeatAcknowledged)
        ranks.clients[1].post(Goodbye())
        assert codes(ranks.answers(0)) == [ErrorCode.GROUP_INCOMPLETE]
        ranks.clients[1].receive()
        ranks.clients[1].hello(pid=os.getpid())
        assert codes(ranks.commit(source, 0)) == [ErrorCode.UNKNOWN_SOURCE]


def test_another_writer_ends_the_group(daemon: Daemon, ranks: Ranks) -> None:
    """Ranks that wait, or had opened, under the former writer's epoch are refused."""
    source = opened(ranks)
    ranks.group = "next"
    with unharmed(daemon):
        ranks.post_open(1)
        daemon.acquire_writer(takeover=True)
        assert codes(ranks.answers(1)) == [ErrorCode.STALE_EPOCH]
        assert codes(ranks.commit(source, 0, 1)) == [ErrorCode.STALE_EPOCH] * 2


def test_only_the_ranks_may_use_the_source(two_ranks: DaemonProcess, daemon: Daemon, ranks: Ranks) -> None:
    """A session that is none of them can neither commit nor close it; any rank can."""
    source = opened(ranks)
    with unharmed(daemon), raw_client(two_ranks.endpoint) as stranger:
        stranger.hello(pid=os.getpid())
        assert stranger.refused(CommitRefit(epoch=ranks.epoch, source=source)).code is ErrorCode.STALE_EPOCH
        assert stranger.refused(CloseSource(epoch=ranks.epoch, source=source)).code is ErrorCode.STALE_EPOCH
        ranks.clients[1].ask(CloseSource(epoch=ranks.epoch, source=source), SourceClosed)
        assert codes(ranks.commit(source, 0)) == [ErrorCode.UNKNOWN_SOURCE]


def test_shards_need_a_group(daemon: Daemon, ranks: Ranks) -> None:
    """One session alone cannot open a source of shards."""
    with unharmed(daemon):
        assert codes(ranks.open(0, member=None)) == [ErrorCode.INVALID_DESCRIPTOR]


def test_none_of_the_ranks_is_the_writer(daemon: Daemon, ranks: Ranks, two_ranks: DaemonProcess) -> None:
    """Ranks that know the writer's epoch but do not include it are refused."""
    with unharmed(daemon), raw_client(two_ranks.endpoint) as third:
        third.hello(pid=os.getpid())
        writer, ranks.clients[0] = ranks.clients[0], third
        assert codes(ranks.open(0, 1)) == [ErrorCode.GROUP_MISMATCH] * 2
        ranks.clients[0] = writer
