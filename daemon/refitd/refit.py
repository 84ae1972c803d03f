"""Refits: sources opened, weights committed or nothing, restored where that failed half-way.

Two phases. Everything that can be refused is refused before the first byte is written: then nothing has changed and
generation goes on. After the first byte the gate stays shut until a complete set of weights is there again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from weakref import WeakKeyDictionary

import msgspec

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    AcquireWriter,
    CloseSource,
    CommitRefit,
    GetDigest,
    JoinCollective,
    OpenPhase,
    OpenSource,
    PrepareRefit,
    RefitCommitted,
    RefitHeld,
    RefitPath,
    RefitPrepared,
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
from refitd.bucket_refits import BucketRefits
from refitd.checkpoints import checkpoint_directory
from refitd.commit import Commit, Ticket
from refitd.config import Config
from refitd.engine import Engine
from refitd.gate import Gate
from refitd.in_place import prepare_in_place, write_in_place
from refitd.open_refit import OpenRefit, Preparation
from refitd.open_window import STOPPING, OpenWindow
from refitd.ranks import combine_paths
from refitd.running import Running
from refitd.sessions import Answer, Call, Session
from refitd.source import Source
from refitd.sources import Sources
from refitd.standing import StandBy, Standing
from refitd.terms import hold_seconds, ticket_for, wait_seconds
from refitd.writer import Writer


class Refit:
    """The writer's role, its sources, and refits that are done in one message; `buckets` are those that take several.

    Belongs to the event loop's thread.
    """

    def __init__(self, config: Config, engine: Engine, gate: Gate, commit: Commit, epoch: int) -> None:
        self._config = config
        self._engine = engine
        self._gate = gate
        self._commit = commit
        # Of one session one after the other: what goes on behind an answer would end what is begun next.
        self._letting_go: WeakKeyDictionary[Session, asyncio.Lock] = WeakKeyDictionary()
        self.writer = Writer(epoch)
        self._ids = itertools.count(1)
        self._running = Running()
        self._standing = StandBy(config.refit, engine, gate, commit, self._running, self._ids)
        self._sources = Sources(config, engine, commit, self.writer, self._standing, self._ids, self._running.run)
        self._window = OpenWindow(config.refit, engine, commit, self.writer, self._sources, self._running)
        self.buckets = BucketRefits(config, engine, gate, commit, self._sources, self._window, self._running, self._ids)

    @property
    def sources(self) -> int:
        return len(self._sources)

    @property
    def open_phase(self) -> OpenPhase | None:
        """Of the refit that waits for its trainer's next word, if one does."""
        return None if self._window.refit is None else self._window.refit.phase

    @property
    def stands_by(self) -> bool:
        return self._standing.state is Standing.UP

    # --- the writer ---------------------------------------------------------------------------------------------------

    async def acquire_writer(self, call: Call) -> AsyncIterator[Answer]:
        """Comes back when the writer before has let go: its refit aborted, its memory unmapped."""
        assert isinstance(call.body, AcquireWriter)
        # Another may have acquired it meanwhile: it is the writer of this moment that is taken over.
        while (previous := self.writer.session) is not None and previous.closed:
            await self._running.to_its_end(self._let_go(previous, "its session ended"))
        epoch = self.writer.acquire(call.owner, takeover=call.body.takeover)
        if previous is not None and previous is not call.owner:
            self._sources.end_groups(_writer_changed())
            await self._running.to_its_end(self._let_go(previous, "another session took over"))
        yield Answer(WriterAcquired(epoch=epoch))

    async def release_writer(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, ReleaseWriter)
        await self._running.to_its_end(self._let_go(call.owner, "writer released"))
        yield Answer(WriterReleased())

    async def session_closed(self, session: Session, why: str) -> None:
        """Aborts what the session had begun, unmaps its memory."""
        await self._running.to_its_end(self._let_go(session, why))

    async def settle(self) -> None:
        """Ends what is open, gives up what waits, and waits for what writes; afterwards no refit is or will be open."""
        self._commit.drain()
        await self._standing.stop(STOPPING)
        self._sources.end_groups(ProtocolError(ErrorCode.DRAINING, STOPPING))
        self._running.withdraw_all(STOPPING)
        while self._window.refit is not None or self._running.tasks:
            # First what is just beginning: only it knows what it has written.
            if self._running.windows:
                await asyncio.wait(self._running.windows)
            elif self._window.refit is not None:
                await self._window.abort(self._window.refit, STOPPING)
            else:
                await asyncio.wait(self._running.tasks, return_when=asyncio.FIRST_COMPLETED)

    # --- sources ------------------------------------------------------------------------------------------------------

    async def open_source(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, OpenSource)
        body = call.body
        if body.member is not None:
            deadline_seconds = wait_seconds(body.deadline_seconds, self._config.refit)
            yield Answer(await self._sources.open_with_others(call.owner, body, deadline_seconds))
            return
        self.writer.check(call.owner, body.epoch)
        self._commit.refuse_while_busy()
        yield Answer(await self._running.to_its_end(self._sources.open_alone(call.owner, body)))

    async def join_collective(self, call: Call) -> AsyncIterator[Answer]:
        """Generation goes on while the group forms; a session that ends meanwhile ends the waiting too."""
        assert isinstance(call.body, JoinCollective)
        body = call.body
        self.writer.check(call.owner, body.epoch)
        self._commit.refuse_while_busy()
        yield Answer(await self._running.to_its_end(self._sources.join_collective(call.owner, body)))

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
        source = self._sources.of_writer(call.owner, body.epoch, body.source)
        ticket = ticket_for(body, self._commit, self._config.refit, partial=body.partial or body.only is not None)
        path = await self._running.to_its_end(self._validate(source, body, ticket))
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
            OpenRefit.announce(0, source.session, source, body.tensors, ticket)
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
        await self._standing.known()
        group = self._sources.usable(call.owner, body.epoch, body.source).group
        if group is None:
            yield Answer(await self._commit_now(body))
        else:
            deadline_seconds = wait_seconds(body.deadline_seconds, self._config.refit)
            yield Answer(await group.commit(call.owner, body, deadline_seconds, self._commit_now))

    async def _commit_now(self, body: CommitRefit) -> RefitHeld | RefitCommitted:
        source = self._sources.find(body.source)
        source.require("inplace")
        try:
            ticket = self._ticket_in_place(source, body)
        except ProtocolError as error:
            await self._standing.refused(source, error.message)
            raise
        if body.hold:
            return await self._running.in_window(source.session, ticket, self._hold_in_place(source, body, ticket))
        report = await self._running.in_window(source.session, ticket, self._commit_in_place(source, body, ticket))
        self._standing.want(source, ticket)
        return RefitCommitted(report=report)

    def _ticket_in_place(self, source: Source, body: CommitRefit) -> Ticket:
        if body.release is not None:
            source.require_release(body.release)
        if source.replayed and not self._commit.is_busy:
            # First of all, since everything else is done meanwhile.
            self._engine.rehearse_in_workers(source.id)
        ticket = ticket_for(body, self._commit, self._config.refit, partial=body.only is not None)
        self._standing.expect(source, ticket, hold=body.hold)
        return ticket

    async def _commit_in_place(self, source: Source, body: CommitRefit, ticket: Ticket) -> RefitReport:
        async with self._standing.taken_up(source, ticket), self._commit.window(ticket):
            ticket.check()
            try:
                answers = await write_in_place(
                    self._engine, self._config.refit, source, body.only, ticket, body.release
                )
            finally:
                self._standing.answered(ticket)
            return await self._commit.publish(ticket, answers)

    async def _hold_in_place(self, source: Source, body: CommitRefit, ticket: Ticket) -> RefitHeld:
        refit = OpenRefit(next(self._ids), source.session, source, {}, ticket)
        async with self._window.opened(refit):
            ticket.check()
            refit.held = await write_in_place(self._engine, self._config.refit, source, body.only, ticket, body.release)
            return refit.as_held()

    async def prepare(self, call: Call) -> AsyncIterator[Answer]:
        """All of a commit but the copy: `buckets.finish` does that."""
        assert isinstance(call.body, PrepareRefit)
        body = call.body
        source = self._sources.of_writer(call.owner, body.epoch, body.source)
        source.require("inplace")
        if source.group is not None:
            message = "what several ranks lend cannot be prepared: let every rank send CommitRefit"
            raise ProtocolError(ErrorCode.UNSUPPORTED, message)
        held = hold_seconds(body.hold_seconds, self._config.refit)
        ticket = ticket_for(body, self._commit, self._config.refit, partial=body.only is not None)
        yield Answer(await self._running.in_window(call.owner, ticket, self._prepare(source, body.only, held, ticket)))

    async def _prepare(
        self, source: Source, only: list[str] | None, held_seconds: float, ticket: Ticket
    ) -> RefitPrepared:
        refit = OpenRefit(next(self._ids), source.session, source, {}, ticket)
        async with self._window.opened(refit):
            ring, workers = await prepare_in_place(self._engine, self._config.refit, source, only, ticket, refit.id)
            refit.preparation = Preparation(only, held_seconds)
            return RefitPrepared(refit=refit.id, version=ticket.version, ring=ring, workers=workers)

    # --- from disk ----------------------------------------------------------------------------------------------------

    async def reload(self, call: Call) -> AsyncIterator[Answer]:
        """A refit whose weights lie in a checkpoint on this machine."""
        assert isinstance(call.body, ReloadWeights)
        body = call.body
        self.writer.check(call.owner, body.epoch)
        ticket = ticket_for(body, self._commit, self._config.refit, partial=False)
        report = await self._running.in_window(call.owner, ticket, self._reload(body.path, ticket))
        yield Answer(RefitCommitted(report=report))

    async def _reload(self, path: str | None, ticket: Ticket) -> RefitReport:
        refit = self._config.refit
        # Disks may be slow: neither others' requests wait for them, nor whoever takes the role over.
        directory = str(await ticket.wait(asyncio.to_thread(checkpoint_directory, path, self._config)))
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
        self._require_torn()
        started = time.monotonic()
        await self._running.in_window(call.owner, None, self._commit.restore())
        milliseconds = (time.monotonic() - started) * 1e3
        yield Answer(
            WeightsRestored(version=self._gate.version, digest=self._commit.digest, total_milliseconds=milliseconds)
        )

    def _require_torn(self) -> None:
        state = self._gate.state
        if state is not EngineState.TORN:
            message = f"nothing to restore while {state.value}"
            raise ProtocolError(ErrorCode.NOT_ALLOWED_NOW, message, state=state.value)

    async def digest(self, call: Call) -> AsyncIterator[Answer]:
        """Reads what is served; waits like a request while a refit is under way."""
        assert isinstance(call.body, GetDigest)
        version = await self._gate.admit()
        digest = await self._commit.read_digest(call.body.mode)
        yield Answer(WeightsDigest(version=version, mode=call.body.mode, digest=digest))

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _let_go(self, session: Session, why: str) -> None:
        self._sources.rank_left(session, why)
        async with self._letting_go.setdefault(session, asyncio.Lock()):
            if self.writer.session is session:
                self._sources.end_groups(_writer_changed())
            await self._running.leave_windows(session, why)
            await self._window.let_go(session, why)
            await self._sources.close_all_of(session)
            self.writer.release(session)


def _writer_changed() -> ProtocolError:
    return ProtocolError(
        ErrorCode.STALE_EPOCH, "the writer of these ranks has given up its role: acquire it and open the source again"
    )
