"""Refits from all ranks of a trainer at once: every rank lends what it holds, and all get the same report."""

from __future__ import annotations

import secrets
import weakref
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    CloseSource,
    CommitRefit,
    GroupMember,
    Heartbeat,
    HeartbeatAcknowledged,
    OpenSource,
    PlanMode,
    RefitCommitted,
    RefitReport,
    SourceClosed,
    SourceOpened,
)
from refit_trainer.connection import Connection
from refit_trainer.errors import DaemonRestarted, DaemonUnreachable, NotShareable, RefitdError
from refit_trainer.one_refit import OneRefit
from refit_trainer.refits import CommitOptions, RefitOptions, split_options
from refit_trainer.steps import Steps
from refit_trainer.writer import WriterRole

if TYPE_CHECKING:
    from refit_trainer.backends import ExportedMemory
    from refit_trainer.sharing import SharedModule

LEADER = 0
# Instead of the epoch, where the leader could not take the role.
_NO_EPOCH = -1
_RESTARTED = -2
# For one round trip; a rank that gets no answer by then has no daemon.
_LOOK_SECONDS = 30.0
# The daemon refused this one commit; what the ranks had opened is still open.
_STILL_OPEN = frozenset(
    {
        ErrorCode.VERSION_NOT_INCREASING,
        ErrorCode.NOT_FINITE,
        ErrorCode.MANIFEST_MISMATCH,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.REFIT_IN_PROGRESS,
    }
)


@dataclass(frozen=True)
class _Terms:
    """What the leader decides for all: the writer's epoch, and a secret for a source that may have to be opened."""

    epoch: int
    secret: tuple[int, int]

    @property
    def group(self) -> str:
        return "".join(f"{part:016x}" for part in self.secret)


@dataclass(frozen=True)
class _Opened:
    session: str
    epoch: int
    source: int
    memory: weakref.ref[ExportedMemory]


class _Standing(IntEnum):
    """How a rank stands with the daemon; the worst of all ranks is what counts."""

    OPEN = 0
    NOT_OPEN = 1
    LOST = 2
    RESTARTED = 3


class RankedRefits:
    """One rank's side. Rank 0 of torch.distributed's default group leads: its session is the writer's."""

    def __init__(self, connection: Connection, role: WriterRole, plan: PlanMode | None) -> None:
        self._connection = connection
        self._role = role
        self._plan = plan
        self._opened: _Opened | None = None
        self._doubtful = False

    def refit(self, shared: SharedModule, given: RefitOptions) -> Steps[RefitReport]:
        """Has to be called by every rank with the same options. Raises on every rank, though not always the same."""
        only, options, timeout_seconds = split_options(given)
        if not dist.is_initialized():
            raise NotShareable("the module is sharded: call refit() from every rank, inside torch.distributed")
        turn = OneRefit(self._connection, self._role, timeout_seconds)
        try:
            terms = yield from self._agree(turn, shared)
            return (yield from self._commit(shared, terms, only, options, timeout_seconds))
        finally:
            yield turn.leave()

    def _commit(
        self,
        shared: SharedModule,
        terms: _Terms,
        only: list[str] | None,
        options: CommitOptions,
        timeout_seconds: float,
    ) -> Steps[RefitReport]:
        """Opened together, where that is not done yet, and then committed together."""
        try:
            if (yield from self._agreed_standing(shared, terms)) is not _Standing.OPEN:
                yield from self._open(shared, terms, timeout_seconds)
            assert self._opened is not None, "opened above"
            command = CommitRefit(epoch=terms.epoch, source=self._opened.source, only=only, **options)
            # The others are waited for first, and then the refit may take as long.
            committed: RefitCommitted = yield self._connection.request(
                command, RefitCommitted, timeout_seconds=2 * timeout_seconds
            )
            return committed.report
        except BaseException as error:
            self._doubtful = not isinstance(error, RefitdError) or error.code not in _STILL_OPEN
            yield self._role.end_unanswered(error, timeout_seconds=timeout_seconds)
            raise

    def _agree(self, turn: OneRefit, shared: SharedModule) -> Steps[_Terms]:
        """The leader takes the role and tells the others; they also learn when it could not."""
        if dist.get_rank() != LEADER:
            terms = _told(None, shared.device)
            if terms.epoch == _RESTARTED:
                yield from self._look()
                raise _restarted()
            if terms.epoch == _NO_EPOCH:
                raise RefitdError("rank 0 could not acquire the writer's role: see its error", retryable=True)
            return terms
        try:
            yield turn.enter()
        except BaseException as error:
            reason = _RESTARTED if isinstance(error, DaemonRestarted) else _NO_EPOCH
            _told(_Terms(reason, (0, 0)), shared.device)
            raise
        return _told(_Terms(turn.epoch, (secrets.randbits(63), secrets.randbits(63))), shared.device)

    def _agreed_standing(self, shared: SharedModule, terms: _Terms) -> Steps[_Standing]:
        """OPEN or NOT_OPEN, alike on every rank. Raises on every rank where one could not open its part: the others
        would wait for it until the deadline."""
        own = _Standing.OPEN if self._is_open(shared, terms) else (yield from self._look())
        worst = _worst(own, shared.device)
        if worst is _Standing.RESTARTED:
            raise _restarted()
        if worst is _Standing.LOST:
            message = "a rank does not reach the daemon"
            raise RefitdError(message, code=ErrorCode.GROUP_INCOMPLETE, retryable=True)
        return worst

    def _look(self, *, again: bool = True) -> Steps[_Standing]:
        """A round trip. Each rank's connection tells a restart of its own accord, once: here and not in the middle."""
        try:
            yield self._connection.request(Heartbeat(), HeartbeatAcknowledged, timeout_seconds=_LOOK_SECONDS)
        except DaemonRestarted:
            return _Standing.RESTARTED
        except DaemonUnreachable:
            # This rank may notice only now that the daemon it was connected to is gone.
            return (yield from self._look(again=False)) if again else _Standing.LOST
        except RefitdError:
            return _Standing.LOST
        return _Standing.NOT_OPEN

    def _is_open(self, shared: SharedModule, terms: _Terms) -> bool:
        opened = self._opened
        return (
            opened is not None
            and not self._doubtful
            and opened.memory() is shared.memory
            and (opened.session, opened.epoch) == (self._connection.welcome.session, terms.epoch)
        )

    def _open(self, shared: SharedModule, terms: _Terms, timeout_seconds: float) -> Steps[None]:
        if dist.get_rank() == LEADER:
            yield from self._close_former(terms, timeout_seconds)
        self._opened = None
        command = OpenSource(
            epoch=terms.epoch,
            kind="inplace",
            segments=shared.memory.segments,
            tensors=shared.tensors,
            plan=self._plan,
            member=GroupMember(group=terms.group, rank=dist.get_rank(), world_size=dist.get_world_size()),
            deadline_seconds=timeout_seconds,
        )
        opened: SourceOpened = yield self._connection.request(
            command, SourceOpened, timeout_seconds=2 * timeout_seconds
        )
        session = self._connection.welcome.session
        self._opened = _Opened(session, terms.epoch, opened.source, weakref.ref(shared.memory))
        self._doubtful = False

    def _close_former(self, terms: _Terms, timeout_seconds: float) -> Steps[None]:
        if self._opened is None or self._opened.epoch != terms.epoch:
            return
        command = CloseSource(epoch=terms.epoch, source=self._opened.source)
        try:
            yield self._connection.request(command, SourceClosed, timeout_seconds=timeout_seconds)
        except RefitdError as error:
            if error.code is not ErrorCode.UNKNOWN_SOURCE:
                raise


def _told(terms: _Terms | None, device: torch.device) -> _Terms:
    """The leader's terms, on every rank."""
    numbers = torch.tensor([0, 0, 0] if terms is None else [terms.epoch, *terms.secret], device=device)
    dist.broadcast(numbers, LEADER)
    epoch, *secret = numbers.tolist()
    return _Terms(epoch, (secret[0], secret[1]))


def _worst(own: _Standing, device: torch.device) -> _Standing:
    """Of all ranks."""
    number = torch.tensor(int(own), device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return _Standing(int(number))


def _restarted() -> DaemonRestarted:
    return DaemonRestarted("the daemon was restarted: it serves the weights it was started with, so refit again")
