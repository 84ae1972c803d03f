"""The commands of a refit by broadcast: everything that the daemon is told, and nothing of the group itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    BroadcastReceived,
    CloseSource,
    CollectiveJoined,
    FinishRefit,
    JoinCollective,
    PlanMode,
    ReceiveBroadcast,
    RefitCommitted,
    RefitReport,
    SourceClosed,
)
from refit_protocol.tensors import TensorShape
from refit_trainer.connection import Connection
from refit_trainer.errors import RefitdError
from refit_trainer.layouts import announced
from refit_trainer.one_refit import OneRefit
from refit_trainer.refits import CommitOptions, RefitOptions, split_options
from refit_trainer.writer import WriterRole

# The daemon gives hanging workers a few seconds more than they have themselves.
_JOIN_GRACE_SECONDS = 15.0
# They have everything: that the sender is told so too is a matter of threads taking turns.
_LAST_PAUSE_SECONDS = 0.0002
_REASON_SECONDS = 5.0
# The workers have been told by the broken group; a daemon that is gone answers nothing.
_ABORT_SECONDS = 5.0


class BroadcastRefit(OneRefit):
    """A refit from a collective source. While it is under way the workers may be waiting for broadcasts."""

    def __init__(self, connection: Connection, role: WriterRole, source: int, timeout_seconds: float) -> None:
        super().__init__(connection, role, timeout_seconds)
        self._source = source
        self._receiving: asyncio.Task[BroadcastReceived] | None = None

    async def begin(self, tensors: Sequence[TensorShape], options: CommitOptions, *, partial: bool) -> None:
        """Everything is validated and the gate shut when this returns; then the workers await the broadcasts."""
        began = await self._begin(self._source, list(tensors), options, partial=partial)
        self._receiving = asyncio.create_task(
            self._go_on(ReceiveBroadcast(epoch=self._epoch, refit=began.refit), BroadcastReceived)
        )

    async def pause(self, seconds: float) -> None:
        """At most so long, less once the workers have everything; raises what the daemon has refused meanwhile."""
        assert self._receiving is not None, "begin() comes first"
        if self._receiving.done():
            self._receiving.result()
            await asyncio.sleep(_LAST_PAUSE_SECONDS)
        else:
            await asyncio.wait({self._receiving}, timeout=seconds)

    async def finish(self) -> RefitReport:
        assert self._receiving is not None, "begin() comes first"
        assert self._number is not None, "begin() comes first"
        await self._receiving
        committed = await self._go_on(FinishRefit(epoch=self._epoch, refit=self._number), RefitCommitted)
        self._number = None
        return committed.report

    async def reason(self, error: BaseException) -> BaseException:
        """The daemon's word on it, where the group only broke: that came of what the daemon knows."""
        if self._receiving is None or not isinstance(error, RefitdError) or error.code != ErrorCode.COLLECTIVE_FAILED:
            return error
        await asyncio.wait({self._receiving}, timeout=_REASON_SECONDS)
        if self._receiving.done() and not self._receiving.cancelled():
            return self._receiving.exception() or error
        return error

    async def abort(self, error: BaseException) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
        await super().abort(error)

    def _abort_seconds(self, error: BaseException) -> float:  # noqa: ARG002
        return _ABORT_SECONDS


async def join_group(
    connection: Connection,
    role: WriterRole,
    address: str,
    port: int,
    world_size: int,
    first_rank: int,
    *,
    plan: PlanMode | None,
    timeout_seconds: float,
) -> CollectiveJoined:
    """The engine's workers join the group that somebody hosts at `address` and `port`; returns when it is complete."""
    async with role.writing(timeout_seconds + _JOIN_GRACE_SECONDS) as epoch:
        command = JoinCollective(
            epoch=epoch,
            address=address,
            port=port,
            world_size=world_size,
            first_rank=first_rank,
            timeout_seconds=timeout_seconds,
            plan=plan,
        )
        return await connection.request(
            command, CollectiveJoined, timeout_seconds=timeout_seconds + _JOIN_GRACE_SECONDS
        )


async def leave_group(connection: Connection, role: WriterRole, source: int, *, timeout_seconds: float) -> None:
    """Does nothing where the daemon has dropped the source already."""
    role.take_announced(source)
    with contextlib.suppress(RefitdError):
        async with role.writing(timeout_seconds) as epoch:
            command = CloseSource(epoch=epoch, source=source)
            await connection.request(command, SourceClosed, timeout_seconds=timeout_seconds)


async def refit_by_broadcast(
    connection: Connection, role: WriterRole, source: int, tensors: Sequence[TensorShape], given: RefitOptions
) -> RefitReport:
    """For whoever is not the sender: the broadcasts are another process's, of those of `tensors` that `only` names."""
    only, options, timeout_seconds = split_options(given)
    layout = announced(tensors, only)
    refit = BroadcastRefit(connection, role, source, timeout_seconds)
    try:
        await refit.enter()
        await refit.begin([*layout.values()], options, partial=only is not None)
        return await refit.finish()
    except BaseException as error:
        await refit.abort(error)
        raise
    finally:
        await refit.leave()
