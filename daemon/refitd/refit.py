"""Refits: sources opened, weights committed or nothing, restored where that failed half-way.

Two phases. Everything that can be refused is refused before the first byte is written: then nothing has changed and
generation goes on. After the first byte the gate stays shut until a complete set of weights is there again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
import structlog

from refit_protocol.broadcast import BroadcastLayout
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    AbortRefit,
    AcquireWriter,
    ApplyBucket,
    AttestMode,
    BeginRefit,
    BroadcastReceived,
    BucketApplied,
    CloseSource,
    CommitRefit,
    FinishRefit,
    GetDigest,
    JoinCollective,
    OpenSource,
    ReceiveBroadcast,
    RefitAborted,
    RefitBegan,
    RefitCommitted,
    RefitHeld,
    RefitPath,
    RefitReport,
    RefitValidated,
    ReleaseWriter,
    ReloadWeights,
    RestoreWeights,
    SourceClosed,
    ValidateRefit,
    WeightsDigest,
    WeightsRestored,
    WriterAcquired,
    WriterReleased,
)
from refit_protocol.states import EngineState
from refit_protocol.tensors import check_pieces
from refitd.checkpoints import checkpoint_directory
from refitd.commit import Commit, Ticket
from refitd.config import Config
from refitd.engine import Engine
from refitd.gate import Gate
from refitd.ranks import combine_paths
from refitd.sessions import Answer, Call, Session
from refitd.source import BucketRefit, Source, unknown_refit
from refitd.sources import Sources
from refitd.writer import Writer

STOPPING = "the daemon is shutting down"

log = structlog.get_logger()


class Refit:
    """All sources and the one refit under way. Belongs to the event loop's thread."""

    def __init__(self, config: Config, engine: Engine, gate: Gate, commit: Commit, epoch: int) -> None:
        self._config = config
        self._engine = engine
        self._gate = gate
        self._commit = commit
        self.writer = Writer(epoch)
        self._ids = itertools.count(1)
        self._bucket_refit: BucketRefit | None = None
        self._ending: BucketRefit | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._windows: dict[asyncio.Task[Any], tuple[Session, Ticket]] = {}
        self._sources = Sources(config, engine, commit, self.writer, self._ids, self._run)

    @property
    def sources(self) -> int:
        return len(self._sources)

    # --- the writer ---------------------------------------------------------------------------------------------------

    async def acquire_writer(self, call: Call) -> AsyncIterator[Answer]:
        """Comes back when the writer before has let go: its refit aborted, its memory unmapped."""
        assert isinstance(call.body, AcquireWriter)
        # Another may have acquired it meanwhile: it is the writer of this moment that is taken over.
        while (previous := self.writer.session) is not None and previous.closed:
            await self._finish_even_if_cancelled(self._let_go(previous, "its session ended"))
        epoch = self.writer.acquire(call.owner, takeover=call.body.takeover)
        if previous is not None and previous is not call.owner:
            self._sources.end_groups(_writer_changed())
            await self._finish_even_if_cancelled(self._let_go(previous, "another session took over"))
        yield Answer(WriterAcquired(epoch=epoch))

    async def release_writer(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, ReleaseWriter)
        await self._finish_even_if_cancelled(self._let_go(call.owner, "writer released"))
        yield Answer(WriterReleased())

    async def session_closed(self, session: Session, why: str) -> None:
        """Aborts what the session had begun, unmaps its memory."""
        await self._finish_even_if_cancelled(self._let_go(session, why))

    async def settle(self) -> None:
        """Ends what is open, gives up what waits, and waits for what writes; afterwards no refit is or will be open."""
        self._commit.drain()
        self._sources.end_groups(ProtocolError(ErrorCode.DRAINING, STOPPING))
        for _, ticket in self._windows.values():
            ticket.withdraw(STOPPING)
        while self._bucket_refit is not None or self._running:
            # First what is just beginning: only it knows what it has written.
            if self._windows:
                await asyncio.wait(self._windows)
            elif self._bucket_refit is not None:
                await self._abort(self._bucket_refit, STOPPING)
            else:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)

    # --- sources ------------------------------------------------------------------------------------------------------

    async def open_source(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, OpenSource)
        body = call.body
        if body.member is not None:
            wait_seconds = self._wait_seconds(body.deadline_seconds)
            yield Answer(await self._sources.open_with_others(call.owner, body, wait_seconds))
            return
        self.writer.check(call.owner, body.epoch)
        self._commit.refuse_while_busy()
        yield Answer(await self._finish_even_if_cancelled(self._sources.open_alone(call.owner, body)))

    async def join_collective(self, call: Call) -> AsyncIterator[Answer]:
        """Generation goes on while the group forms; a session that ends meanwhile ends the waiting too."""
        assert isinstance(call.body, JoinCollective)
        body = call.body
        self.writer.check(call.owner, body.epoch)
        self._commit.refuse_while_busy()
        yield Answer(await self._finish_even_if_cancelled(self._sources.join_collective(call.owner, body)))

    async def close_source(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, CloseSource)
        source = self._sources.usable(call.owner, call.body.epoch, call.body.source)
        self._commit.refuse_while_busy()
        await self._sources.close(source)
        yield Answer(SourceClosed(source=source.id))

    # --- the dry run --------------------------------------------------------------------------------------------------

    async def validate(self, call: Call) -> AsyncIterator[Answer]:
        """Raises what a refit with these arguments would be refused with; the gate stays open."""
        assert isinstance(call.body, ValidateRefit)
        body = call.body
        self.writer.check(call.owner, body.epoch)
        source = self._sources.find(body.source)
        ticket = self._ticket(body, partial=body.partial or body.only is not None)
        path = await self._finish_even_if_cancelled(self._validate(source, body, ticket))
        yield Answer(
            RefitValidated(
                version=ticket.version,
                path=path,
                restorable_version=self._commit.restorable_version,
                milliseconds=(time.monotonic() - ticket.started) * 1e3,
            )
        )

    async def _validate(self, source: Source, body: ValidateRefit, ticket: Ticket) -> RefitPath:
        if source.kind != "inplace":
            BucketRefit.announce(0, source.session, source, body.tensors, ticket)
        answers = await self._engine.call_workers(
            "refitd_validate",
            source.id,
            [msgspec.to_builtins(tensor) for tensor in body.tensors],
            body.only,
            body.partial,
            ticket.check_finite,
            self._config.refit.plan,
            timeout_seconds=self._config.refit.deadline_seconds,
        )
        return combine_paths(answers)

    # --- in place -----------------------------------------------------------------------------------------------------

    async def commit(self, call: Call) -> AsyncIterator[Answer]:
        """One pass over the bytes, straight from the trainer's parameters."""
        assert isinstance(call.body, CommitRefit)
        body = call.body
        group = self._sources.usable(call.owner, body.epoch, body.source).group
        if group is None:
            yield Answer(await self._commit_now(body))
        else:
            wait_seconds = self._wait_seconds(body.deadline_seconds)
            yield Answer(await group.commit(call.owner, body, wait_seconds, self._commit_now))

    async def _commit_now(self, body: CommitRefit) -> RefitHeld | RefitCommitted:
        source = self._sources.find(body.source)
        source.require("inplace")
        ticket = self._ticket(body, partial=body.only is not None)
        if body.hold:
            held: RefitHeld = await self._in_window(source.session, ticket, self._hold_in_place(source, body, ticket))
            return held
        report = await self._in_window(source.session, ticket, self._commit_in_place(source, body, ticket))
        return RefitCommitted(report=report)

    async def _commit_in_place(self, source: Source, body: CommitRefit, ticket: Ticket) -> RefitReport:
        async with self._commit.window(ticket):
            return await self._commit.publish(ticket, await self._write_in_place(source, body, ticket))

    async def _write_in_place(self, source: Source, body: CommitRefit, ticket: Ticket) -> list[dict[str, Any]]:
        ticket.check()
        answers = await self._engine.call_workers(
            "refitd_commit",
            source.id,
            body.only,
            ticket.attest,
            ticket.check_finite,
            timeout_seconds=self._config.refit.deadline_seconds,
            writes=True,
            direct=source.replayed,
        )
        source.replayed = _is_replayed(answers)
        return answers

    async def _hold_in_place(self, source: Source, body: CommitRefit, ticket: Ticket) -> RefitHeld:
        refit = BucketRefit(next(self._ids), source.session, source, {}, ticket)
        await self._open_window(refit)
        try:
            refit.held = await self._write_in_place(source, body, ticket)
            held = refit.as_held()
        except BaseException as error:
            await self._end_bucket_refit(refit, error)
            raise
        await self._leave_open(refit)
        return held

    # --- buckets ------------------------------------------------------------------------------------------------------

    async def begin(self, call: Call) -> AsyncIterator[Answer]:
        """Validates all that was announced, then shuts the gate: nothing is written yet."""
        assert isinstance(call.body, BeginRefit)
        body = call.body
        self.writer.check(call.owner, body.epoch)
        source = self._sources.find(body.source)
        if source.kind == "inplace":
            source.require("bucket")
        ticket = self._ticket(body, partial=body.partial)
        refit = await self._in_window(call.owner, ticket, self._begin(call.owner, source, body, ticket))
        yield Answer(RefitBegan(refit=refit.id, version=ticket.version))

    async def _begin(self, session: Session, source: Source, body: BeginRefit, ticket: Ticket) -> BucketRefit:
        if body.again:
            refit = BucketRefit.announce_again(next(self._ids), session, source, ticket)
        else:
            refit = BucketRefit.announce(next(self._ids), session, source, body.tensors, ticket)
        await self._open_window(refit)
        try:
            ticket.check()
            await self._engine.call_workers(
                "refitd_begin",
                source.id,
                None if body.again else [msgspec.to_builtins(tensor) for tensor in body.tensors],
                body.partial,
                self._config.refit.plan,
                timeout_seconds=self._config.refit.deadline_seconds,
                direct=source.replayed,
            )
        except BaseException as error:
            await self._end_bucket_refit(refit, error)
            raise
        source.announced = refit.announced
        await self._leave_open(refit)
        return refit

    async def _open_window(self, refit: BucketRefit) -> None:
        window = self._commit.window(refit.ticket)
        await window.__aenter__()
        refit.window = window
        self._bucket_refit = refit

    async def _leave_open(self, refit: BucketRefit) -> None:
        """The window waits, not for ever, for its session's next message. Raises `unknown_refit` if none may come."""
        self._check_current(refit)
        refit.watch(self._run(self._abort_at_deadline(refit)))
        if self._commit.is_draining:
            await self._abort(refit, STOPPING)
        elif refit.session.closed or self.writer.session is not refit.session:
            await self._abort(refit, "its session is the writer no more")
        self._check_current(refit)

    async def apply_bucket(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, ApplyBucket)
        body = call.body
        refit = self._refit_under_way(call.owner, body.epoch, body.refit)
        refit.require_unfinished()
        refit.source.require("bucket")
        pieces = self._config.server.max_bucket_pieces
        if len(body.pieces) > pieces:
            raise ProtocolError(ErrorCode.LIMIT_EXCEEDED, f"{len(body.pieces)} pieces, at most {pieces}", limit=pieces)
        check_pieces(body.pieces, refit.announced, refit.source.bucket_bytes(body.bucket))
        # Nothing to write must not count as having written.
        empty = not any(piece.count for piece in body.pieces)
        size_bytes = 0 if empty else await self._finish_even_if_cancelled(self._apply(refit, body))
        yield Answer(BucketApplied(refit=refit.id, bucket=body.bucket, size_bytes=size_bytes))

    async def _apply(self, refit: BucketRefit, body: ApplyBucket) -> int:
        async with refit.order:
            self._check_current(refit)
            # It may have waited behind the end.
            refit.require_unfinished()
            # Sent in this order, and the next one is not kept waiting for the answer.
            applied = self._run(
                self._engine.call_workers(
                    "refitd_apply_bucket",
                    body.bucket,
                    [msgspec.to_builtins(piece) for piece in body.pieces],
                    timeout_seconds=self._config.refit.deadline_seconds,
                    writes=True,
                    direct=True,
                )
            )
            refit.applying.add(applied)
            applied.add_done_callback(refit.applying.discard)
        try:
            answers = await applied
        except ProtocolError as error:
            await self._end_bucket_refit(refit, error)
            raise
        self._check_current(refit)
        return sum(int(answer["bytes"]) for answer in answers)

    async def receive_broadcast(self, call: Call) -> AsyncIterator[Answer]:
        """Short RPCs: between two of them the refit can be aborted, and the engine shows that it is alive."""
        assert isinstance(call.body, ReceiveBroadcast)
        refit = self._refit_under_way(call.owner, call.body.epoch, call.body.refit)
        refit.source.require("collective")
        if refit.reception != "awaited":
            message = f"the broadcasts of refit {refit.id} are {refit.reception}: they come once"
            raise ProtocolError(ErrorCode.NOT_ALLOWED_NOW, message, state=self._gate.state.value)
        refit.reception = "under way"
        size_bytes = await self._finish_even_if_cancelled(self._receive(refit))
        yield Answer(BroadcastReceived(refit=refit.id, size_bytes=size_bytes))

    async def _receive(self, refit: BucketRefit) -> int:
        while refit.reception != "complete":
            async with refit.order:
                self._check_current(refit)
                refit.require_unfinished()
                try:
                    await self._receive_some(refit)
                except ProtocolError as error:
                    await self._end_bucket_refit(refit, error)
                    raise
        return BroadcastLayout(tuple(refit.announced.values()), refit.source.broadcast_bytes).size_bytes

    async def _receive_some(self, refit: BucketRefit) -> None:
        """The workers' wait ends before ours: else a trainer that is slow would pass for an engine that hangs."""
        remaining_seconds = refit.ticket.remaining_seconds
        answers = await self._engine.call_workers(
            "refitd_receive",
            remaining_seconds,
            timeout_seconds=remaining_seconds + self._config.refit.deadline_seconds,
            writes=True,
            direct=True,
        )
        if all(answer["complete"] for answer in answers):
            refit.reception = "complete"

    async def finish(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, FinishRefit)
        refit = self._refit_under_way(call.owner, call.body.epoch, call.body.refit)
        yield Answer(await self._finish_even_if_cancelled(self._finish(refit, hold=call.body.hold)))

    async def _finish(self, refit: BucketRefit, *, hold: bool) -> RefitHeld | RefitCommitted:
        async with refit.order:
            # A bucket that fails ends the refit.
            while refit.applying:
                await asyncio.wait(refit.applying)
            self._check_current(refit)
            try:
                if refit.held is None:
                    refit.held = await self._complete(refit)
                if hold:
                    return refit.as_held()
                report = await self._commit.publish(refit.ticket, refit.held)
            except ProtocolError as error:
                await self._end_bucket_refit(refit, error)
                raise
            await self._end_bucket_refit(refit, None)
            return RefitCommitted(report=report)

    async def _complete(self, refit: BucketRefit) -> list[dict[str, Any]]:
        answers = await self._engine.call_workers(
            "refitd_finish",
            refit.ticket.attest,
            refit.ticket.check_finite,
            timeout_seconds=self._config.refit.deadline_seconds,
            writes=True,
            direct=refit.source.replayed,
        )
        refit.source.replayed = _is_replayed(answers)
        return answers

    async def abort(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, AbortRefit)
        refit = self._refit_under_way(call.owner, call.body.epoch, call.body.refit)
        if not await self._finish_even_if_cancelled(self._abort(refit, "the trainer aborted")):
            raise unknown_refit(refit.id)
        yield Answer(RefitAborted(refit=refit.id, state=self._gate.state, version=self._gate.version))

    async def _abort(self, refit: BucketRefit, why: str) -> bool:
        """Whether there was anything to abort: it may have waited behind the end."""
        async with refit.order:
            if self._bucket_refit is not refit:
                return False
            try:
                answers = await self._engine.call_workers(
                    "refitd_abort", timeout_seconds=self._config.refit.deadline_seconds
                )
                # To the workers a held refit is finished.
                wrote = refit.held is not None or any(answer["wrote"] for answer in answers)
                error: ProtocolError = self._commit.failure(f"refit {refit.id} was aborted: {why}", wrote=wrote)
            except ProtocolError as unreachable:
                error = unreachable
            await self._end_bucket_refit(refit, error)
            return True

    async def _abort_at_deadline(self, refit: BucketRefit) -> None:
        await asyncio.sleep(max(0.0, refit.ticket.remaining_seconds))
        await self._abort(refit, f"not finished within {refit.ticket.deadline_seconds:g} s")

    async def _end_bucket_refit(self, refit: BucketRefit, error: BaseException | None) -> None:
        """Leaves the window exactly once, with the error that ended it."""
        if self._bucket_refit is not refit:
            return
        self._bucket_refit, self._ending = None, refit
        refit.unwatch()
        try:
            if error is not None and refit.reception == "under way":
                await self._end_reception(refit)
            assert refit.window is not None
            swallowed = await refit.window.__aexit__(type(error) if error else None, error, None)
            assert not swallowed
        finally:
            self._ending = None
            refit.ended.set()

    async def _end_reception(self, refit: BucketRefit) -> None:
        """Before the window is left: the next broadcast may be arriving in the very parameters that are put back."""
        try:
            await self._sources.close(refit.source)
        # The window knows what to do: the engine is dead, or its workers refuse to put anything back.
        except ProtocolError as failure:
            log.error("the broadcasts could not be ended", refit=refit.id, reason=failure.message)

    # --- from disk ----------------------------------------------------------------------------------------------------

    async def reload(self, call: Call) -> AsyncIterator[Answer]:
        """A refit whose weights lie in a checkpoint on this machine."""
        assert isinstance(call.body, ReloadWeights)
        body = call.body
        self.writer.check(call.owner, body.epoch)
        # Disks may be slow, and others' requests do not wait for them; the role may be lost meanwhile.
        directory = await asyncio.to_thread(checkpoint_directory, body.path, self._config)
        self.writer.check(call.owner, body.epoch)
        ticket = self._ticket(body, partial=False)
        report = await self._in_window(call.owner, ticket, self._reload(str(directory), ticket))
        yield Answer(RefitCommitted(report=report))

    async def _reload(self, directory: str, ticket: Ticket) -> RefitReport:
        refit = self._config.refit
        # Before the gate shuts, too: a wrong path must not cost running requests anything.
        await self._engine.call_workers(
            "refitd_check_checkpoint", directory, refit.plan, timeout_seconds=refit.deadline_seconds
        )
        async with self._commit.window(ticket):
            ticket.check()
            answers = await self._engine.call_workers(
                "refitd_reload",
                directory,
                refit.plan,
                ticket.attest,
                ticket.check_finite,
                timeout_seconds=refit.deadline_seconds,
                writes=True,
            )
            return await self._commit.publish(ticket, answers)

    # --- restore and look ---------------------------------------------------------------------------------------------

    async def restore(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, RestoreWeights)
        self.writer.check(call.owner, call.body.epoch)
        if self._gate.state is not EngineState.TORN:
            raise ProtocolError(
                ErrorCode.NOT_ALLOWED_NOW,
                f"nothing to restore while {self._gate.state.value}",
                state=self._gate.state.value,
            )
        started = time.monotonic()
        await self._finish_even_if_cancelled(self._commit.restore())
        milliseconds = (time.monotonic() - started) * 1e3
        yield Answer(
            WeightsRestored(version=self._gate.version, digest=self._commit.digest, total_milliseconds=milliseconds)
        )

    async def digest(self, call: Call) -> AsyncIterator[Answer]:
        """Reads what is served; waits like a request while a refit is under way."""
        assert isinstance(call.body, GetDigest)
        version = await self._gate.admit()
        digest = await self._commit.read_digest(call.body.mode)
        yield Answer(WeightsDigest(version=version, mode=call.body.mode, digest=digest))

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _let_go(self, session: Session, why: str) -> None:
        self._sources.rank_left(session, why)
        if self.writer.session is session:
            self._sources.end_groups(_writer_changed())
        await self._leave_windows(session, why)
        refit = self._bucket_refit
        if refit is not None and refit.session is session:
            await self._abort(refit, why)
        if self._ending is not None and self._ending.session is session:
            # Else the next writer would find the gate still shut.
            await self._ending.ended.wait()
        await self._sources.close_all_of(session)
        self.writer.release(session)

    def _ticket(self, body: CommitRefit | BeginRefit | ReloadWeights | ValidateRefit, *, partial: bool) -> Ticket:
        self._commit.refuse_while_busy()
        defaults = self._config.refit
        deadline_seconds = self._wait_seconds(body.deadline_seconds)
        attest: AttestMode = body.attest or defaults.attest
        return self._commit.ticket(
            version=body.version,
            policy=body.policy or defaults.policy,
            attest=attest,
            check_finite=defaults.check_finite if body.check_finite is None else body.check_finite,
            deadline_seconds=deadline_seconds,
            partial=partial,
        )

    def _wait_seconds(self, asked: float | None) -> float:
        if asked is not None and asked <= 0:
            raise ProtocolError(ErrorCode.DEADLINE_EXCEEDED, f"deadline_seconds is {asked:g}: none is left")
        return asked or self._config.refit.deadline_seconds

    def _refit_under_way(self, session: Session, epoch: int, refit_id: int) -> BucketRefit:
        self.writer.check(session, epoch)
        refit = self._bucket_refit
        if refit is None or refit.id != refit_id:
            raise unknown_refit(refit_id)
        return refit

    def _check_current(self, refit: BucketRefit) -> None:
        if self._bucket_refit is not refit:
            raise unknown_refit(refit.id)

    async def _leave_windows(self, session: Session, why: str) -> None:
        """What waits is given up, what writes is waited for: the next writer finds nothing under way."""
        own = {task: ticket for task, (owner, ticket) in self._windows.items() if owner is session}
        for ticket in own.values():
            ticket.withdraw(why)
        if own:
            await asyncio.wait(own)

    async def _in_window(self, session: Session, ticket: Ticket, work: Awaitable[Any]) -> Any:
        """As below; what only waits for the window ends when the session lets go of the writer's role."""
        task = self._run(work)
        self._windows[task] = (session, ticket)
        task.add_done_callback(self._windows.pop)
        return await asyncio.shield(task)

    async def _finish_even_if_cancelled(self, work: Awaitable[Any]) -> Any:
        """A client that goes away must not leave the engine between two versions: the work runs to its end."""
        return await asyncio.shield(self._run(work))

    def _run(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        # Whoever asked may be gone; the failure itself is in the log and in the status already.
        if not task.cancelled():
            task.exception()


def _is_replayed(answers: list[dict[str, Any]]) -> bool:
    return all(answer["path"] == "plan" for answer in answers)


def _writer_changed() -> ProtocolError:
    return ProtocolError(
        ErrorCode.STALE_EPOCH, "the writer of these ranks has given up its role: acquire it and open the source again"
    )
