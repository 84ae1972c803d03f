"""The open sources: memory that a trainer, alone or with all its ranks, has lent, and groups that broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from refit_protocol.bell import check_bell
from refit_protocol.broadcast import BroadcastLayout
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import CollectiveJoined, JoinCollective, OpenSource, SourceOpened
from refit_protocol.states import NOT_SERVABLE, EngineState
from refit_protocol.tensors import Segment, check_segments, check_source_tensors
from refitd.collective import check_group, join_group
from refitd.commit import Commit
from refitd.config import Config
from refitd.engine import Engine, EngineInfo
from refitd.groups import Group, Groups, Run, merged
from refitd.ranks import combine_paths, combine_unplanned
from refitd.sessions import Session
from refitd.source import Source
from refitd.standing import StandBy
from refitd.writer import Writer


class Sources:
    """Opens and closes; `run` lets work go on when who asked for it is gone. Belongs to the event loop's thread."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        commit: Commit,
        writer: Writer,
        standing: StandBy,
        ids: Iterator[int],
        run: Run,
    ) -> None:
        self._config = config
        self._engine = engine
        self._commit = commit
        self._writer = writer
        self._standing = standing
        self._ids = ids
        self._sources: dict[int, Source] = {}
        self._opening = 0
        self._groups = Groups(run)

    def __len__(self) -> int:
        return len(self._sources)

    def find(self, source_id: int) -> Source:
        source = self._sources.get(source_id)
        if source is None:
            raise ProtocolError(ErrorCode.UNKNOWN_SOURCE, f"source {source_id} is not open: send OpenSource")
        return source

    def of_writer(self, session: Session, epoch: int, source_id: int) -> Source:
        """For the writer alone."""
        self._writer.check(session, epoch)
        return self.find(source_id)

    def usable(self, session: Session, epoch: int, source_id: int) -> Source:
        """For the writer, and for the ranks that opened the source with it."""
        source = self._sources.get(source_id)
        if source is not None and source.belongs_to(session):
            self._writer.check_epoch(epoch)
        else:
            self._writer.check(session, epoch)
        return self.find(source_id)

    async def open_alone(self, session: Session, body: OpenSource) -> SourceOpened:
        self._loaded()
        _check_source(session, body)
        return await self._open(session, body, None)

    async def open_with_others(self, session: Session, body: OpenSource, wait_seconds: float) -> SourceOpened:
        """Comes back when all ranks have come. What one does wrong is told to all of them at once."""
        self._loaded()
        self._writer.check_epoch(body.epoch)
        group = self._groups.group_for(body, wait_seconds)
        try:
            _check_source(session, body)
        except ProtocolError as error:
            group.dissolve(error)
            raise
        return await group.join(session, body, lambda ranks: self._open_group(group, ranks))

    def _loaded(self) -> EngineInfo:
        """Raises `loading`."""
        if self._engine.info is None:
            raise ProtocolError(*NOT_SERVABLE[EngineState.LOADING])
        return self._engine.info

    async def join_collective(self, session: Session, body: JoinCollective) -> CollectiveJoined:
        workers = len(self._loaded().devices)
        check_group(body, workers)
        source = Source(next(self._ids), session, "collective", ())
        self._sources[source.id] = source
        try:
            joined = await join_group(self._engine, self._config.refit, source.id, body, workers)
        except ProtocolError:
            await self.close(source)
            raise
        source.broadcasts = BroadcastLayout((), joined.bucket_bytes)
        return joined

    async def close(self, source: Source) -> None:
        if self._sources.pop(source.id, None) is not None:
            if source.group is not None:
                source.group.dissolve(ProtocolError(ErrorCode.UNKNOWN_SOURCE, f"source {source.id} has been closed"))
            await self._standing.forget(source)
            await self._engine.call_workers(
                "refitd_close_source", source.id, timeout_seconds=self._config.refit.deadline_seconds
            )

    async def close_all_of(self, session: Session) -> None:
        for source in [source for source in self._sources.values() if source.belongs_to(session)]:
            await self.close(source)

    def rank_left(self, session: Session, why: str) -> None:
        """Ranks that wait for it are told."""
        self._groups.left(session, why)

    def end_groups(self, error: ProtocolError) -> None:
        """Ranks that wait for others wait in vain."""
        self._groups.dissolve_all(error)

    async def _open_group(self, group: Group, ranks: Mapping[int, OpenSource]) -> SourceOpened:
        body, writer = merged(ranks), self._writer.session
        self._writer.check_epoch(body.epoch)
        if writer is None or not group.has(writer):
            raise ProtocolError(ErrorCode.GROUP_MISMATCH, "none of the ranks is the writer: let one acquire the role")
        self._commit.refuse_while_busy()
        return await self._open(writer, body, group)

    async def _open(self, session: Session, body: OpenSource, group: Group | None) -> SourceOpened:
        source = Source(next(self._ids), session, body.kind, tuple(body.segments), group=group)
        with self._room_for(len(body.segments)):
            answers = await self._engine.call_workers(
                "refitd_open_source",
                source.id,
                body.kind,
                [msgspec.to_builtins(segment, builtin_types=(bytes,)) for segment in body.segments],
                [msgspec.to_builtins(tensor) for tensor in body.tensors],
                body.plan or self._config.refit.plan,
                None if body.bell is None else msgspec.to_builtins(body.bell),
                timeout_seconds=self._config.refit.deadline_seconds,
            )
        source.releases = all(answer["release"] for answer in answers)
        source.stands_by = body.stand_by and body.bell is not None and body.kind == "inplace"
        self._sources[source.id] = source
        if source.abandoned or self._writer.session is not session:
            await self.close(source)
        return SourceOpened(
            source=source.id,
            path=combine_paths(answers),
            tensors=len({tensor.name for tensor in body.tensors}),
            size_bytes=sum(int(answer["bytes"]) for answer in answers),
            unplanned=combine_unplanned(answers),
            release=source.releases,
            workers=len(answers),
        )

    @contextmanager
    def _room_for(self, segments: int) -> Iterator[None]:
        """Held while the workers open them, since others may be opened meanwhile.

        Every segment of every source takes a mapping in every worker. Raises `limit_exceeded`.
        """
        limit = self._config.server.max_open_segments
        held = self._opening + sum(len(source.segments) for source in self._sources.values())
        if held + segments > limit:
            raise ProtocolError(
                ErrorCode.LIMIT_EXCEEDED,
                f"{segments} segments beside {held} that are open, at most {limit}: close sources, or lend fewer",
                limit=limit,
            )
        self._opening += segments
        try:
            yield
        finally:
            self._opening -= segments


def _check_source(session: Session, body: OpenSource) -> None:
    check_segments(body.segments)
    _check_bell(body)
    _check_peer(session, body)
    if body.kind == "inplace":
        check_source_tensors(body.tensors, body.segments)
    elif body.tensors:
        raise ProtocolError(ErrorCode.INVALID_DESCRIPTOR, "a bucket source has no tensors: BeginRefit names them")
    elif body.member is not None:
        raise ProtocolError(ErrorCode.INVALID_DESCRIPTOR, "ranks open in-place sources together, no buckets")
    if body.member is None and (sharded := [tensor.name for tensor in body.tensors if tensor.shard is not None]):
        raise ProtocolError(ErrorCode.INVALID_DESCRIPTOR, f"{sharded[0]} is a shard: open the source with all ranks")


def _check_bell(body: OpenSource) -> None:
    if body.bell is None:
        return
    if body.member is not None:
        message = "a bell is for a source that one process opens alone"
        raise ProtocolError(ErrorCode.INVALID_DESCRIPTOR, message)
    check_bell(body.bell)


def _check_peer(session: Session, body: OpenSource) -> None:
    """Memory is taken only from the process that opened the session."""
    lent: list[Segment] = [*body.segments, *([] if body.bell is None else [body.bell])]
    foreign = [segment.pid for segment in lent if segment.pid != session.pid]
    if foreign:
        raise ProtocolError(
            ErrorCode.INVALID_DESCRIPTOR,
            f"segment of process {foreign[0]}, but the session belongs to process {session.pid}: say pid in Hello",
        )
