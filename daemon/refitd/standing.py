"""A refit that stands by: whenever the engine has nothing to do, all of the next one is done but its copy.

The gate stays open meanwhile. Whoever comes to it, and whatever else the workers are asked for, waits until the refit
has given way; only the commit that it was made for takes it up. Its trainer may have rung for the copy before that
commit is here, and then nobody passes until it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from enum import StrEnum

import structlog

from refit_protocol.bell import RELEASE_SECONDS, ring_number
from refit_protocol.errors import ProtocolError
from refit_protocol.messages import AttestMode
from refit_protocol.states import step
from refitd.commit import Commit, Ticket
from refitd.config import RefitConfig
from refitd.engine import Engine
from refitd.gate import Gate
from refitd.running import Running
from refitd.source import Source
from refitd.worker_error import WorkerError

# Without a request or a refit. A phase of training lasts much longer, a pause between two batches does not.
QUIET_SECONDS = 0.1

log = structlog.get_logger()


class Standing(StrEnum):
    DOWN = "down"
    RISING = "rising"
    UP = "up"
    RUNG = "rung"


class StandingEvent(StrEnum):
    BEGUN = "the workers are asked to make it ready"
    READY = "the workers have answered"
    GAVE_WAY = "somebody came, and nothing had been copied"
    WAS_RUNG = "somebody came, but the trainer had rung, or nobody can say that it had not"
    COMMITTED = "its commit has come, and the workers have answered it"
    ABANDONED = "no commit came for what was rung, or the engine died"


_S, _E = Standing, StandingEvent
STANDING_TRANSITIONS: dict[tuple[Standing, StandingEvent], Standing] = {
    (_S.DOWN, _E.BEGUN): _S.RISING,
    (_S.RISING, _E.READY): _S.UP,
    (_S.UP, _E.GAVE_WAY): _S.DOWN,
    (_S.UP, _E.WAS_RUNG): _S.RUNG,
    (_S.UP, _E.COMMITTED): _S.DOWN,
    (_S.UP, _E.ABANDONED): _S.DOWN,
    (_S.RUNG, _E.COMMITTED): _S.DOWN,
    (_S.RUNG, _E.ABANDONED): _S.DOWN,
}


class StandBy:
    """At most one refit at a time. Belongs to the event loop's thread."""

    def __init__(
        self, config: RefitConfig, engine: Engine, gate: Gate, commit: Commit, running: Running, ids: Iterator[int]
    ) -> None:
        self._config = config
        self._engine = engine
        self._gate = gate
        self._commit = commit
        self._running = running
        self._ids = ids
        self.state = Standing.DOWN
        self._source: Source | None = None
        self._wanted: tuple[Source, AttestMode] | None = None
        # Of what the workers are asked for; held no longer than they take to answer.
        self._asking = asyncio.Lock()
        self._changed = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        # How many have come that take it up, and have not ended.
        self._commits = 0

    # --- for commits in place -----------------------------------------------------------------------------------------

    async def known(self) -> None:
        """Comes back when no worker is just being asked to make one ready, or to give way."""
        async with self._asking:
            return

    def expect(self, source: Source, ticket: Ticket, *, hold: bool) -> None:
        """Finds out whether this very commit is what stands by; if so, `taken_up` is to follow."""
        stands = self.state in (Standing.UP, Standing.RUNG) and self._source is source
        ticket.stands = stands and not (hold or ticket.partial or ticket.check_finite)
        self._commits += ticket.stands

    @property
    def is_up(self) -> bool:
        return self.state is not Standing.DOWN

    def answered(self, ticket: Ticket) -> None:
        """The workers have done what stood by, or the same without it where it had given way, or say what they have
        written of it; nothing stands by at them."""
        if ticket.stands and self.is_up:
            ticket.stood_by = True
            self._step(StandingEvent.COMMITTED)

    @asynccontextmanager
    async def taken_up(self, source: Source, ticket: Ticket) -> AsyncIterator[None]:
        """Around a commit: what stands by for it ends with it, also where no worker has been asked."""
        try:
            try:
                yield
            finally:
                self._commits -= ticket.stands
        except Exception as error:
            await self.refused(source, str(error))
            raise

    async def refused(self, source: Source, why: str) -> None:
        """No commit comes any more for what stands by for this source, but for one that has come already."""
        if self._source is source and not self._commits:
            await self._running.to_its_end(self._end(why))

    def want(self, source: Source, ticket: Ticket) -> None:
        """After a commit: from now on the next one like it is to stand by, if its trainer wishes."""
        if source.stands_by and source.replayed and not (ticket.partial or ticket.check_finite):
            self._wanted = source, ticket.attest
            if self._keeping is None or self._keeping.done():
                self._keeping = asyncio.create_task(self._keep(), name="stand by")

    # --- for everybody else -------------------------------------------------------------------------------------------

    async def give_way(self) -> None:
        """Comes back when none stands by, for the moment: ended, or committed where its trainer has rung already. Goes
        on when whoever has come is gone: half-way new weights might be there that nobody knows of."""
        await self._running.to_its_end(self._give_way())

    async def _give_way(self) -> None:
        await self._withdraw()
        if self.state is Standing.RUNG:
            await self._await_commit()

    async def forget(self, source: Source) -> None:
        """The source is about to be closed."""
        if self._wanted is not None and self._wanted[0] is source:
            self._wanted = None
        await self.refused(source, "its source was closed")

    async def stop(self, why: str) -> None:
        """None rises any more, and what stands by ends."""
        self._wanted = None
        # An engine that has died has its own way to say so.
        with suppress(ProtocolError):
            if not self._commits:
                await self._end(why)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        try:
            while self._wanted is not None:
                if await self._is_quiet():
                    await self._rise(*self._wanted)
                await self._until_down()
        # The boundary of a task that nobody waits for: an engine that has died has its own way to say so.
        except Exception as error:  # noqa: BLE001
            log.warning("no refit stands by any more", reason=str(error))

    async def _is_quiet(self) -> bool:
        before = self._may_rise(), self._engine.requests_added
        await asyncio.sleep(QUIET_SECONDS)
        return before == (self._may_rise(), self._engine.requests_added) and before[0]

    def _may_rise(self) -> bool:
        """Whether nobody has anything to do with the engine."""
        coming = self._gate.waiting - self._gate.awaiting_version
        nobody = not (self._gate.running or coming or self._commit.is_busy or self._commit.is_draining)
        # NaN that is left is taken out of the cache at the start of the next refit, by workers that wait for nothing.
        return nobody and self._gate.open and self._engine.is_still and not self._engine.nan_seen

    async def _rise(self, source: Source, attest: AttestMode) -> None:
        # A refit that is about to begin has the order, and so has what is being cleaned.
        async with self._commit.cleaning.order, self._asking:
            if self._wanted is None or not self._may_rise():
                return
            self._source = source
            self._step(StandingEvent.BEGUN)
            try:
                ready = await self._made_ready(source, attest)
            finally:
                self._step(StandingEvent.READY)
        if not ready:
            # Not before the next commit: it may have been the first after a sleep, or from another place in memory.
            self._wanted = None
            await self.give_way()

    async def _made_ready(self, source: Source, attest: AttestMode) -> bool:
        try:
            answers = await self._engine.call_workers(
                "refitd_stand_by",
                source.id,
                attest,
                # A word that is 0 says that none stands by.
                ring_number(next(self._ids)) or ring_number(next(self._ids)),
                timeout_seconds=self._config.deadline_seconds,
                direct=True,
                standing=True,
            )
        except ProtocolError as error:
            log.info("no refit stands by", source=source.id, reason=error.message)
            return False
        return all(answer["waiting"] for answer in answers)

    async def _withdraw(self) -> None:
        async with self._asking:
            if self.state is not Standing.UP:
                return
            try:
                answers = await self._engine.call_workers(
                    "refitd_give_way", timeout_seconds=self._config.deadline_seconds, direct=True, standing=True
                )
            except WorkerError as error:
                log.warning("a worker could not give way", reason=error.message)
                # What it has copied nobody knows.
                self._leave(StandingEvent.WAS_RUNG)
            except ProtocolError:
                self._leave(StandingEvent.ABANDONED)
                raise
            else:
                wrote = any(answer["wrote"] for answer in answers)
                self._leave(StandingEvent.WAS_RUNG if wrote else StandingEvent.GAVE_WAY)

    def _leave(self, event: StandingEvent) -> None:
        """Unless the commit has come meanwhile."""
        if self.state is Standing.UP:
            self._step(event)

    async def _await_commit(self) -> None:
        """One that has come has its own deadline."""
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._until_down()
        except TimeoutError:
            if self._commits:
                await self._until_down()
            await self._abandon(f"its trainer rang for it, and sent no commit within {RELEASE_SECONDS:g} s")

    async def _until_down(self) -> None:
        while self.is_up:
            await self._changed.wait()

    async def _end(self, why: str) -> None:
        """At once, with what has been copied."""
        await self._withdraw()
        await self._abandon(why)

    async def _abandon(self, why: str) -> None:
        """New weights are there that nobody has committed: they are restored, or torn."""
        if self.state is not Standing.RUNG:
            return
        with suppress(ProtocolError):
            await self._fail(f"what stood by was copied, but not committed: {why}")
        if self.state is Standing.RUNG:
            # Not even a window: the engine has died.
            log.warning("what was rung for could not be put back", reason=why)
            self._step(StandingEvent.ABANDONED)

    async def _fail(self, why: str) -> None:
        ticket = self._commit.ticket(
            version=None,
            policy="keep",
            attest="off",
            check_finite=False,
            deadline_seconds=self._config.deadline_seconds,
            partial=False,
            undoes=True,
        )
        ticket.stands = True
        was_rung = False

        def abandon() -> None:
            """Not before the gate is shut, since what is there is not to be served; but before the workers are asked
            for anything, which would wait for the end of this. The commit may have come and failed meanwhile."""
            nonlocal was_rung
            if was_rung := self.state is Standing.RUNG:
                self._step(StandingEvent.ABANDONED)

        ticket.on_shut = abandon
        async with self._commit.window(ticket):
            raise self._commit.failure(why, wrote=was_rung)

    def _step(self, event: StandingEvent) -> None:
        self.state = step(STANDING_TRANSITIONS, self.state, event)
        self._gate.give_way = self._engine.give_way = self._commit.give_way = self.give_way if self.is_up else None
        if not self.is_up:
            self._source = None
        self._changed.set()
        self._changed.clear()
