"""The window of a refit: gate shut, requests dealt with, engine frozen - and open again, or torn and said so."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import structlog

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    AttestMode,
    InflightPolicy,
    RefitMilliseconds,
    RefitReport,
)
from refit_protocol.states import (
    NOT_SERVABLE,
    SLEEP_TRANSITIONS,
    EngineEvent,
    EngineState,
    SleepEvent,
    SleepState,
    step,
)
from refitd.cleaning import Cleaning
from refitd.config import RefitConfig
from refitd.engine import Engine
from refitd.gate import Gate
from refitd.ranks import combine_digests, combine_paths, combine_unplanned
from refitd.worker_error import WorkerError

# Far enough below 2^64 that a version chosen by a trainer never is the last one there can be.
MAX_CHOSEN_VERSION = (1 << 63) - 1
# After the last request's end; a client that sends one request after the other is not slowed down.
SETTLE_AFTER_SECONDS = 0.05
NOTE_AFTER_SECONDS = 0.002
REHEARSE_SECONDS = 0.001
REPORTS_KEPT = 10

log = structlog.get_logger()

_Result = TypeVar("_Result")


@dataclass
class Ticket:
    """One refit's terms, and the clock of its phases; `waited_seconds` for its trainer are not its own. `stands`: it is
    the one that stands by, and does not give way; it `stood_by` if nobody else has ended that. `undoes`: it is for what
    was copied without a refit, and begins also while the daemon drains. `on_shut` is called in the moment in which the
    gate shuts."""

    version: int
    policy: InflightPolicy
    attest: AttestMode
    check_finite: bool
    deadline_seconds: float
    partial: bool
    started: float = field(default_factory=time.monotonic)
    shut: float = 0.0
    waited_seconds: float = 0.0
    stands: bool = False
    stood_by: bool = False
    undoes: bool = False
    on_shut: Callable[[], None] = lambda: None
    _withdrawn: str | None = None
    _waiting: asyncio.Future[Any] | None = None

    async def wait(self, work: Awaitable[_Result]) -> _Result:
        """Waits for `work`, at the longest until the ticket is withdrawn."""
        self.check()
        self._waiting = waiting = asyncio.ensure_future(work)
        try:
            return await waiting
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self._waiting = None

    def withdraw(self, why: str) -> None:
        """The writer is gone: nothing is begun that has not been begun."""
        self._withdrawn = why
        if self._waiting is not None:
            self._waiting.cancel()

    def check(self) -> None:
        """Raises `refit_failed` or `deadline_exceeded`, to be asked before the first byte is written."""
        if self._withdrawn is not None:
            raise WorkerError(ErrorCode.REFIT_FAILED, f"the refit was aborted: {self._withdrawn}", wrote=False)
        if time.monotonic() > self.started + self.deadline_seconds:
            raise WorkerError(
                ErrorCode.DEADLINE_EXCEEDED,
                f"{self.deadline_seconds:g} s were over before the first write",
                wrote=False,
            )

    @property
    def remaining_seconds(self) -> float:
        return max(0.001, self.started + self.deadline_seconds - time.monotonic())


@dataclass(frozen=True)
class _Kept:
    """What the kept weights were when they were committed; no digest where nobody asked for one."""

    digest: str | None
    mode: AttestMode

    def check(self, restored: str | None) -> None:
        """Raises `attest_failed`."""
        if self.digest is not None and restored != self.digest:
            message = f"the weights that were put back have digest {restored}, those committed had {self.digest}"
            raise ProtocolError(ErrorCode.ATTEST_FAILED, message)


class _GivenUpError(WorkerError):
    """By its trainer, which may: no failure where nothing was written."""


class Commit:
    """The only code that moves the engine between two versions."""

    def __init__(self, config: RefitConfig, engine: Engine, gate: Gate) -> None:
        self._config = config
        self._engine = engine
        self._gate = gate
        self._exclusive: str | None = None
        self.is_draining = False
        self.cleaning = Cleaning(engine, config.deadline_seconds, self._is_held, self.stand_down)
        self._settling: asyncio.Task[None] | None = None
        self.digest: str | None = None
        self.digest_mode: AttestMode = "sampled"
        self.restorable_version: int | None = None
        self._kept = _Kept(None, "off")
        self._rehearsal: tuple[Ticket, Sequence[dict[str, Any]]] | None = None
        self._rehearsed = 0.0
        self.reports: deque[RefitReport] = deque(maxlen=REPORTS_KEPT)
        self.abort_requests: Callable[[ErrorCode], Awaitable[None]] = _nothing_to_abort
        # Before a window or a change of sleep, as long as a refit stands by.
        self.give_way: Callable[[], Awaitable[None]] | None = None
        self.on_committed: Callable[[RefitReport], None] = lambda _report: None
        self.on_failed: Callable[[ProtocolError], None] = lambda _error: None
        self.on_restored: Callable[[], None] = lambda: None

    async def begin_service(self) -> None:
        """The loaded weights are version 0: digested and, where asked for, kept."""
        self.digest = await self.read_digest("sampled")
        await self._keep_last()
        self._gate.on_idle = self._settle_soon

    def _settle_soon(self) -> None:
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._settle(), name="settle")

    async def _settle(self) -> None:
        try:
            while not (self._gate.running or self._engine.is_still):
                await asyncio.sleep(SETTLE_AFTER_SECONDS)
                if self._gate.state not in (EngineState.READY, EngineState.REFITTING):
                    return
                if self._gate.open and not self._gate.running:
                    await self._engine.settle(self._config.deadline_seconds)
        # The boundary of a task that nobody waits for: an engine that has died has its own way to say so.
        except Exception as error:  # noqa: BLE001
            log.warning("the engine could not be made still", reason=str(error))

    def ticket(
        self,
        *,
        version: int | None,
        policy: InflightPolicy,
        attest: AttestMode,
        check_finite: bool,
        deadline_seconds: float,
        partial: bool,
        undoes: bool = False,
    ) -> Ticket:
        """Raises what makes a refit impossible from the start: state, version, a partial one on torn weights."""
        if version is not None and version > MAX_CHOSEN_VERSION:
            raise ProtocolError(
                ErrorCode.LIMIT_EXCEEDED, f"version {version} is not below 2^63", limit=MAX_CHOSEN_VERSION
            )
        wanted = self._gate.version + 1 if version is None else version
        ticket = Ticket(wanted, policy, attest, check_finite, deadline_seconds, partial, undoes=undoes)
        self._check(ticket)
        return ticket

    def _check(self, ticket: Ticket) -> None:
        if not ticket.undoes:
            self._refuse_while_draining()
        self.refuse_while_busy()
        state = self._gate.state
        if state not in (EngineState.READY, EngineState.TORN, EngineState.ASLEEP):
            raise ProtocolError(*NOT_SERVABLE[state], state=state.value)
        step(SLEEP_TRANSITIONS, self._gate.sleep, _sleep_event(ticket.partial))
        if ticket.partial and state is EngineState.TORN:
            raise ProtocolError(ErrorCode.TORN, "the weights are torn: only a full refit can replace all of them")
        if ticket.version <= self._gate.version:
            raise ProtocolError(
                ErrorCode.VERSION_NOT_INCREASING,
                f"version {ticket.version} is not above {self._gate.version}, the one served",
                version=self._gate.version,
            )

    @property
    def is_busy(self) -> bool:
        """With a refit, a restore or a change of sleep."""
        return self._gate.state is EngineState.REFITTING or self._exclusive is not None

    def refuse_while_busy(self) -> None:
        """Raises `refit_in_progress` while a refit, a restore or a change of sleep is under way."""
        if self.is_busy:
            what = self._exclusive or "another refit"
            message = f"{what} is under way: wait for its end; one that you have prepared ends with refit() or abort()"
            raise ProtocolError(ErrorCode.REFIT_IN_PROGRESS, message)

    def drain(self) -> None:
        """From now on nothing begins; what is under way is ended by those who began it."""
        self.is_draining = True

    def _refuse_while_draining(self) -> None:
        if self.is_draining:
            raise ProtocolError(*NOT_SERVABLE[EngineState.DRAINING], state=EngineState.DRAINING.value)

    def _is_held(self) -> bool:
        """By a refit, a restore or a change of sleep; and where nothing is served nothing is to be cleaned."""
        return self._gate.state is not EngineState.READY or self._exclusive is not None or self.is_draining

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Keeps refits, restores and changes of sleep apart, also while one of them awaits the engine."""
        self._refuse_while_draining()
        self.refuse_while_busy()
        with self._busy_with(what):
            yield

    @contextmanager
    def _busy_with(self, what: str) -> Iterator[None]:
        self._exclusive = what
        try:
            yield
        finally:
            self._exclusive = None

    @asynccontextmanager
    async def window(self, ticket: Ticket) -> AsyncIterator[None]:
        """Shuts the gate and opens it again, unless the body raises after a write: then the weights are torn.

        The body must `publish` or raise.
        """
        async with self._exclusively(ticket):
            # Again, since a task lies between the ticket and this: no await may come between the check and the step.
            self._check(ticket)
            was_torn = self._gate.state is EngineState.TORN
            sleep_after = step(SLEEP_TRANSITIONS, self._gate.sleep, _sleep_event(ticket.partial))
            self._gate.step(EngineEvent.REFIT_STARTED)
            ticket.on_shut()
        try:
            frozen = await self._quiesce(ticket)
        except BaseException as error:
            self._refused(error, was_torn=was_torn)
            raise
        ticket.shut = time.monotonic()
        try:
            await self._clean_cache()
            yield
        except BaseException as error:
            await self._failed(error, was_torn=was_torn)
            raise
        finally:
            if frozen and self._gate.state is not EngineState.DEAD:
                self._engine.thaw_soon(self._config.deadline_seconds)
        self._gate.sleep = sleep_after
        self._gate.refit_ended(EngineEvent.REFIT_COMMITTED)
        await self._keep_committed()

    @asynccontextmanager
    async def _exclusively(self, ticket: Ticket) -> AsyncIterator[None]:
        """Nothing is cleaned, and no other refit stands by."""
        while True:
            if not ticket.stands:
                await self.stand_down()
            async with self.cleaning.order:
                # One may have risen while the cleaning was waited for; its own commit may need the order to end it.
                if ticket.stands or self.give_way is None:
                    yield
                    return

    async def stand_down(self) -> None:
        """No refit stands by when this returns; nothing may be awaited between that and whatever relies on it."""
        while self.give_way is not None:
            await self.give_way()

    async def publish(self, ticket: Ticket, answers: Sequence[dict[str, Any]]) -> RefitReport:
        """All workers hold the new bytes: the version becomes the one served."""
        copied = time.monotonic()
        self.digest = combine_digests(answers)
        self.digest_mode = ticket.attest
        self.restorable_version = None
        await self._gate.publish(ticket.version)
        report = _report(ticket, answers, self.digest, copied)
        # A list of unplanned tensors may be long.
        self._rehearsal = None if report.unplanned else (ticket, answers)
        self.reports.appendleft(report)
        self._gate.last_error = None
        # A moment later: the trainer waits for the answer.
        asyncio.get_running_loop().call_later(NOTE_AFTER_SECONDS, self._note_commit, report)
        return report

    def rehearse(self) -> None:
        """To be called while the workers are waited for, however often; has no effect.

        Code takes several times as long when it has not run for some milliseconds, and a trainer waits for what
        follows the workers' answer: so that is done now and then with the last refit's.
        """
        now = time.monotonic()
        if self._rehearsal is not None and now > self._rehearsed + REHEARSE_SECONDS:
            self._rehearsed = now
            ticket, answers = self._rehearsal
            _report(ticket, answers, combine_digests(answers), now)

    def _note_commit(self, report: RefitReport) -> None:
        """For the metrics and the log."""
        self.on_committed(report)
        log.info(
            "weights committed",
            version=report.version,
            path=report.path,
            tensors=report.tensors,
            size_bytes=report.size_bytes,
            milliseconds=round(report.milliseconds.total, 3),
            digest=report.digest,
            stood_by=report.stood_by,
        )

    def weights_dropped(self) -> None:
        """Level 2 sleep: nothing is served until a full refit."""
        self.digest = None

    def failure(self, message: str, *, wrote: bool, meant: bool = False) -> WorkerError:
        """`meant`: by its trainer."""
        kind = _GivenUpError if meant else WorkerError
        return kind(ErrorCode.REFIT_FAILED, message, wrote=wrote)

    async def restore(self) -> None:
        """Torn weights are replaced by the last committed ones; raises `nothing_to_restore`."""
        with self.exclusive("a restore"):
            if self._config.keep_last == "none":
                raise ProtocolError(
                    ErrorCode.NOTHING_TO_RESTORE,
                    'no weights were kept: set refit.keep_last = "host", or commit a full refit',
                )
            self._gate.step(EngineEvent.RESTORE_STARTED)
            await self._restore()

    async def _restore(self) -> None:
        """Requests wait meanwhile; if it fails the weights are torn for good."""
        mode: AttestMode = "sampled" if self._kept.mode == "off" else self._kept.mode
        try:
            answers = await self._engine.call_workers(
                "refitd_restore", mode, timeout_seconds=self._config.deadline_seconds
            )
            digest = combine_digests(answers)
            self._kept.check(digest)
        except BaseException:
            if self._gate.state is not EngineState.DEAD:
                self._gate.step(EngineEvent.RESTORE_FAILED)
            raise
        self.digest, self.digest_mode = digest, mode
        self._gate.refit_ended(EngineEvent.RESTORED)
        self.on_restored()
        log.info("weights restored", version=self._gate.version, digest=self.digest)

    async def read_digest(self, mode: Literal["sampled", "full"]) -> str:
        answers = await self._engine.call_workers(
            "refitd_digest", mode, timeout_seconds=self._config.deadline_seconds, direct=True
        )
        digest = combine_digests(answers)
        assert digest is not None
        return digest

    async def _quiesce(self, ticket: Ticket) -> bool:
        """Deals with requests in flight; returns whether the engine was frozen (an idle one needs not)."""
        if ticket.policy == "finish" and self._gate.running:
            await ticket.wait(self._gate.until_idle(ticket.remaining_seconds))
        elif ticket.policy == "abort":
            await self.abort_requests(ErrorCode.ABORTED)
        if self._gate.running:
            await self._engine.freeze(
                clear_cache=ticket.policy == "recompute", timeout_seconds=self._config.deadline_seconds
            )
            return True
        if not self._engine.is_still:
            # The last request has just ended: what the workers are asked from here on takes the short way.
            await self._engine.settle(self._config.deadline_seconds)
        return False

    async def _clean_cache(self) -> None:
        """Before the first write: where this fails nothing has changed."""
        if self._gate.sleep is SleepState.AWAKE:
            await self._engine.clean_cache(self._config.deadline_seconds)

    def _refused(self, error: BaseException, *, was_torn: bool) -> None:
        """Nothing was written."""
        if self._gate.state is EngineState.DEAD:
            return
        self._gate.refit_ended(EngineEvent.REFIT_TORN if was_torn else EngineEvent.REFIT_REFUSED)
        if isinstance(error, _GivenUpError):
            log.info("refit aborted", state=self._gate.state.value, reason=error.message)
            return
        self._note(error)
        log.info("refit refused", state=self._gate.state.value, reason=str(error))

    async def _failed(self, error: BaseException, *, was_torn: bool) -> None:
        if self._gate.state is EngineState.DEAD:
            return
        # An error that is not the workers' own says nothing about what they wrote.
        wrote = error.wrote if isinstance(error, WorkerError) else True
        if not wrote:
            self._refused(error, was_torn=was_torn)
            return
        self.digest = None
        await self._recover(error)
        if isinstance(error, ProtocolError):
            error.details["state"] = self._gate.state.value

    async def _recover(self, error: BaseException) -> None:
        """Restores what was kept; without, running requests end: they must not go on with torn weights."""
        if self._config.keep_last == "none":
            self._gate.step(EngineEvent.REFIT_TORN)
            self._report_failure(error)
        elif await self._put_back(error):
            return
        await self.abort_requests(ErrorCode.TORN)

    async def _put_back(self, error: BaseException) -> bool:
        """Whether the weights from before the refit are served again."""
        self._gate.step(EngineEvent.RESTORE_STARTED)
        self._report_failure(error)
        with self._busy_with("a restore"):
            try:
                await self._restore()
            except ProtocolError as failure:
                log.error("restore failed", reason=failure.message)
                return False
        return True

    def _report_failure(self, error: BaseException) -> None:
        self._note(error)
        log.warning("refit failed", state=self._gate.state.value, reason=str(error))

    def _note(self, error: BaseException) -> None:
        """For the status, the metrics and the trainer."""
        if isinstance(error, ProtocolError):
            self._gate.failed(error)
            self.on_failed(error)
            error.details.setdefault("state", self._gate.state.value)

    async def _keep_committed(self) -> None:
        """Whatever comes of it, the refit has been committed, and its trainer is told so."""
        try:
            await self._keep_last()
        except ProtocolError as error:
            log.warning("what was committed is not kept", version=self._gate.version, reason=error.message)

    async def _keep_last(self) -> None:
        """Asks the workers to copy what is served to host memory, in the background."""
        if self._config.keep_last == "none":
            return
        await self._engine.call_workers(
            "refitd_keep_last", "host", timeout_seconds=self._config.deadline_seconds, direct=True
        )
        self._kept = _Kept(self.digest, self.digest_mode)
        self.restorable_version = self._gate.version


def _report(ticket: Ticket, answers: Sequence[dict[str, Any]], digest: str | None, copied: float) -> RefitReport:
    now = time.monotonic()
    slowest = {
        phase: max(float(answer["milliseconds"][phase]) for answer in answers)
        for phase in ("validate", "copy", "attest")
    }
    return RefitReport(
        version=ticket.version,
        path=combine_paths(answers),
        tensors=max(int(answer["tensors"]) for answer in answers),
        size_bytes=sum(int(answer["bytes"]) for answer in answers),
        partial=ticket.partial,
        policy=ticket.policy,
        unplanned=combine_unplanned(answers),
        digest=digest,
        milliseconds=RefitMilliseconds(
            validate=slowest["validate"],
            gate=(ticket.shut - ticket.started) * 1e3,
            copy=slowest["copy"],
            attest=slowest["attest"],
            publish=(now - copied) * 1e3,
            total=(now - ticket.started - ticket.waited_seconds) * 1e3,
            waited=ticket.waited_seconds * 1e3,
        ),
        stood_by=ticket.stood_by,
    )


def _sleep_event(partial: bool) -> SleepEvent:
    return SleepEvent.PARTIAL_REFIT if partial else SleepEvent.FULL_REFIT


async def _nothing_to_abort(_error: ErrorCode) -> None:
    return None
