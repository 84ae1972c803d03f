"""Refits over several messages: all tensors are announced, come in buckets or broadcasts, and are published at the end.
Those that were prepared, or are held, end here too.

The commands of one such refit, in the order in which they come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    AbortRefit,
    ApplyBucket,
    BeginRefit,
    BroadcastReceived,
    BucketApplied,
    FinishRefit,
    ReceiveBroadcast,
    RefitAborted,
    RefitBegan,
    RefitCommitted,
    RefitHeld,
)
from refit_protocol.tensors import check_pieces
from refitd.commit import Commit, Ticket
from refitd.config import Config
from refitd.engine import Engine
from refitd.gate import Gate
from refitd.in_place import ended_with_writes, finish_in_place
from refitd.open_refit import Beginning, OpenRefit, nothing_begun, unknown_refit
from refitd.open_window import OpenWindow
from refitd.running import Running
from refitd.sessions import Answer, Call, Session
from refitd.source import MAX_LAYOUTS, Source
from refitd.sources import Sources
from refitd.terms import ticket_for
from refitd.worker_error import WorkerError


class BucketRefits:
    """What is open between two commands is in the window. Belongs to the event loop's thread."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        gate: Gate,
        commit: Commit,
        sources: Sources,
        window: OpenWindow,
        running: Running,
        ids: Iterator[int],
    ) -> None:
        self._config = config
        self._engine = engine
        self._gate = gate
        self._commit = commit
        self._sources = sources
        self._window = window
        self._running = running
        self._ids = ids
        self._beginning: Beginning | None = None

    # --- begun --------------------------------------------------------------------------------------------------------

    async def begin(self, call: Call) -> AsyncIterator[Answer]:
        """Validates all that was announced, then shuts the gate: nothing is written yet."""
        assert isinstance(call.body, BeginRefit)
        body = call.body
        beginning = Beginning(call.owner)
        if self._window.is_writers(call.owner):
            self._beginning = beginning
        try:
            source = self._sources.of_writer(call.owner, body.epoch, body.source)
            if source.kind == "inplace":
                source.require("bucket")
            if source.replayed and not self._commit.is_busy:
                # First of all, since everything else is done meanwhile.
                self._engine.rehearse_in_workers(source.id)
            ticket = ticket_for(body, self._commit, self._config.refit, partial=body.partial)
            begun = self._begin(beginning, source, body, ticket)
            beginning.refit = refit = await self._running.in_window(call.owner, ticket, begun)
        finally:
            beginning.is_known.set()
        yield Answer(RefitBegan(refit=refit.id, version=ticket.version))

    async def _begin(self, beginning: Beginning, source: Source, body: BeginRefit, ticket: Ticket) -> OpenRefit:
        session = beginning.session
        if body.again:
            refit = OpenRefit.announce_again(next(self._ids), session, source, ticket)
        else:
            refit = OpenRefit.announce(next(self._ids), session, source, body.tensors, ticket)
        async with self._window.opened(refit):
            ticket.check()
            begun = self._running.run(
                self._engine.call_workers(
                    "refitd_begin",
                    source.id,
                    None if body.again else [msgspec.to_builtins(tensor) for tensor in body.tensors],
                    body.partial,
                    self._config.refit.plan,
                    timeout_seconds=self._config.refit.deadline_seconds,
                    direct=source.replayed,
                )
            )
            if body.again and source.replayed:
                # What the buckets hold is known: they go to the workers behind this, before its answer.
                beginning.tell(refit)
            try:
                await begun
            except WorkerError as error:
                # Where only some of them have refused, the others took what was sent behind this. Nothing more is sent,
                # and this must not overtake a bucket, which has a task of its own.
                async with refit.order:
                    error.wrote = error.wrote or await self._running.run(
                        ended_with_writes(self._engine, self._config.refit)
                    )
                raise
            source.announce(refit.announced)
        return refit

    # --- in buckets ---------------------------------------------------------------------------------------------------

    async def apply_bucket(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, ApplyBucket)
        body = call.body
        refit_id = await self._begun_by(call.owner) if body.refit is None else body.refit
        refit = self._window.under_way(call.owner, body.epoch, refit_id)
        refit.require_unfinished()
        refit.source.require("bucket")
        if known := body.layout is not None and not body.pieces:
            refit.source.require_layout(body.layout, body.bucket)
        else:
            self._check_pieces(refit, body)
            if body.layout is not None:
                # The workers may know it of the new pieces before their trainer does, or though they were refused.
                refit.source.layouts.pop(body.layout, None)
        # Nothing to write must not count as having written.
        empty = not known and not any(piece.count for piece in body.pieces)
        size_bytes = 0 if empty else await self._running.to_its_end(self._apply(refit, body))
        yield Answer(BucketApplied(refit=refit.id, bucket=body.bucket, size_bytes=size_bytes))

    async def _begun_by(self, session: Session) -> int:
        """The number of the refit that it has asked for last, once that has one. Raises `unknown_refit`."""
        beginning = self._beginning
        if beginning is None or beginning.session is not session:
            raise nothing_begun()
        refit = await beginning.known()
        if refit is None:
            raise nothing_begun()
        return refit.id

    def _check_pieces(self, refit: OpenRefit, body: ApplyBucket) -> None:
        limit = self._config.server.max_bucket_pieces
        if len(body.pieces) > limit:
            raise ProtocolError(ErrorCode.LIMIT_EXCEEDED, f"{len(body.pieces)} pieces, at most {limit}", limit=limit)
        if body.layout is not None and not 0 <= body.layout < MAX_LAYOUTS:
            message = f"layout {body.layout} is not in 0..{MAX_LAYOUTS - 1}"
            raise ProtocolError(ErrorCode.LIMIT_EXCEEDED, message, limit=MAX_LAYOUTS)
        check_pieces(body.pieces, refit.announced, refit.source.bucket_bytes(body.bucket))

    async def _apply(self, refit: OpenRefit, body: ApplyBucket) -> int:
        async with refit.order:
            self._window.require(refit)
            # It may have waited behind the end.
            refit.require_unfinished()
            applied = self._send(refit, body)
        async with self._window.ended_by_failure(refit):
            answers = await applied
        self._window.require(refit)
        if body.layout is not None:
            refit.source.layouts[body.layout] = body.bucket
        return sum(int(answer["bytes"]) for answer in answers)

    def _send(self, refit: OpenRefit, body: ApplyBucket) -> asyncio.Task[list[dict[str, Any]]]:
        """Buckets are sent in their order, and the next one is not kept waiting for the answer."""
        applied = self._running.run(
            self._engine.call_workers(
                "refitd_apply_bucket",
                body.bucket,
                [msgspec.to_builtins(piece) for piece in body.pieces],
                body.layout,
                timeout_seconds=self._config.refit.deadline_seconds,
                writes=True,
                direct=True,
            )
        )
        refit.applying.add(applied)
        applied.add_done_callback(refit.applying.discard)
        return applied

    # --- in broadcasts ------------------------------------------------------------------------------------------------

    async def receive_broadcast(self, call: Call) -> AsyncIterator[Answer]:
        """Short RPCs: between two of them the refit can be aborted, and the engine shows that it is alive."""
        assert isinstance(call.body, ReceiveBroadcast)
        refit = self._window.under_way(call.owner, call.body.epoch, call.body.refit)
        refit.source.require("collective")
        self._require_awaited(refit)
        refit.reception = "under way"
        size_bytes = await self._running.to_its_end(self._receive(refit))
        yield Answer(BroadcastReceived(refit=refit.id, size_bytes=size_bytes))

    def _require_awaited(self, refit: OpenRefit) -> None:
        if refit.reception != "awaited":
            message = f"the broadcasts of refit {refit.id} are {refit.reception}: they come once"
            raise ProtocolError(ErrorCode.NOT_ALLOWED_NOW, message, state=self._gate.state.value)

    async def _receive(self, refit: OpenRefit) -> int:
        while refit.reception != "complete":
            async with refit.order:
                self._window.require(refit)
                refit.require_unfinished()
                async with self._window.ended_by_failure(refit):
                    await self._receive_some(refit)
        return refit.source.broadcasts_of(tuple(refit.announced.values())).size_bytes

    async def _receive_some(self, refit: OpenRefit) -> None:
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

    # --- ended --------------------------------------------------------------------------------------------------------

    async def finish(self, call: Call) -> AsyncIterator[Answer]:
        """Also copies what was prepared in place, and publishes what is held."""
        assert isinstance(call.body, FinishRefit)
        refit = self._window.under_way(call.owner, call.body.epoch, call.body.refit)
        if call.body.done is not None:
            refit.source.require_release(call.body.done)
        yield Answer(await self._running.to_its_end(self._finish(refit, hold=call.body.hold, done=call.body.done)))

    async def _finish(self, refit: OpenRefit, *, hold: bool, done: int | None) -> RefitHeld | RefitCommitted:
        async with refit.order:
            if not refit.source.replayed:
                # The loader takes its time, which is not to be counted from here on.
                await refit.all_applied()
            self._window.require(refit)
            async with self._window.ended_by_failure(refit):
                if refit.held is None:
                    refit.held = await self._complete(refit, done)
                self._window.require(refit)
                if hold:
                    return refit.as_held()
                report = await self._commit.publish(refit.ticket, refit.held)
            await self._window.end(refit, None)
            return RefitCommitted(report=report)

    async def _complete(self, refit: OpenRefit, done: int | None) -> list[dict[str, Any]]:
        """Asked of the workers behind the last bucket; that one's failure ends the refit, and not what follows from
        it."""
        try:
            return await self._completed(refit, done)
        finally:
            await refit.all_applied()

    async def _completed(self, refit: OpenRefit, done: int | None) -> list[dict[str, Any]]:
        if (prepared := refit.preparation) is not None:
            refit.preparation = None
            self._window.watch(refit)
            refit.ticket.waited_seconds = time.monotonic() - prepared.since
            return await finish_in_place(self._engine, self._config.refit, refit.source, prepared.only, refit.ticket)
        # On a task of its own, as each bucket is: it must not start before those of the buckets.
        answers = await self._running.run(
            self._engine.call_workers(
                "refitd_finish",
                refit.ticket.attest,
                refit.ticket.check_finite,
                done,
                timeout_seconds=self._config.refit.deadline_seconds,
                writes=True,
                direct=refit.source.replayed,
            )
        )
        refit.source.note_written(answers)
        return answers

    async def abort(self, call: Call) -> AsyncIterator[Answer]:
        assert isinstance(call.body, AbortRefit)
        refit = self._window.under_way(call.owner, call.body.epoch, call.body.refit)
        if not await self._running.to_its_end(self._window.abort(refit, "the trainer aborted", meant=True)):
            raise unknown_refit(refit.id)
        yield Answer(RefitAborted(refit=refit.id, state=self._gate.state, version=self._gate.version))
