"""A refit in the middle of it: begun, and its trainer has still something to say."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import OpenPhase, RefitHeld
from refit_protocol.tensors import TensorShape, check_shape, check_unique
from refitd.commit import Ticket
from refitd.ranks import combine_digests
from refitd.sessions import Session
from refitd.source import Source


@dataclass(frozen=True)
class Preparation:
    """Of a commit in place, which waits for its trainer's `FinishRefit`, for `hold_seconds`."""

    only: list[str] | None
    hold_seconds: float
    since: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Beginning:
    """Of a refit that a session has asked for; once it `is_known` what becomes of it, `refit` is there, or refused."""

    session: Session
    refit: OpenRefit | None = None
    is_known: asyncio.Event = field(default_factory=asyncio.Event)
    _asking: int = 0

    def tell(self, refit: OpenRefit) -> None:
        self.refit = refit
        self.is_known.set()

    async def known(self) -> OpenRefit | None:
        """None where it was refused. Whoever asks first goes on first."""
        self._asking += 1
        try:
            if not self.is_known.is_set():
                await self.is_known.wait()
            elif self._asking > 1:
                # Those who waited for it wake in this turn of the loop.
                await asyncio.sleep(0)
            return self.refit
        finally:
            self._asking -= 1


@dataclass(eq=False)
class OpenRefit:
    """A window that stays open over several messages: from `BeginRefit`, `PrepareRefit` or a commit with `hold` to its
    end.

    `order` keeps pipelined buckets in the order they came in, `applying` are those that the workers have not answered
    yet. `held` is what the workers said when everything had been written and only publishing was left. What ends a
    refit while its `reception` of broadcasts is under way leaves their group out of step. Once it has `ended`, and that
    can take long, its window has been left. `preparation` is there where a commit in place is still to come.
    """

    id: int
    session: Session
    source: Source
    announced: dict[str, TensorShape]
    ticket: Ticket
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    applying: set[asyncio.Future[Any]] = field(default_factory=set)
    window: AbstractAsyncContextManager[None] | None = None
    held: list[dict[str, Any]] | None = None
    preparation: Preparation | None = None
    reception: Literal["awaited", "under way", "complete"] = "awaited"
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _deadline: asyncio.Task[Any] | None = None

    @classmethod
    def announce(
        cls, refit_id: int, session: Session, source: Source, tensors: list[TensorShape], ticket: Ticket
    ) -> OpenRefit:
        """Raises `invalid_descriptor` for impossible shapes and duplicate names."""
        check_unique([tensor.name for tensor in tensors])
        for tensor in tensors:
            check_shape(tensor)
        return cls(refit_id, session, source, {tensor.name: tensor for tensor in tensors}, ticket)

    @classmethod
    def announce_again(cls, refit_id: int, session: Session, source: Source, ticket: Ticket) -> OpenRefit:
        """Raises `invalid_descriptor` where there was no refit from this source yet."""
        if source.announced is None:
            message = f"nothing was announced from source {source.id} yet: send the tensors"
            raise ProtocolError(ErrorCode.INVALID_DESCRIPTOR, message)
        return cls(refit_id, session, source, source.announced, ticket)

    def require_unfinished(self) -> None:
        """Raises `not_allowed_now` for what would be written after the end."""
        if self.held is not None:
            raise ProtocolError(ErrorCode.NOT_ALLOWED_NOW, f"refit {self.id} is held: finish or abort it", state="held")

    async def all_applied(self) -> None:
        """Comes back when no bucket is on its way to the workers, or with them."""
        while self.applying:
            await asyncio.wait(self.applying)

    @property
    def patience_seconds(self) -> float:
        """How long it may stay open without a word of its trainer."""
        held_seconds = self.ticket.remaining_seconds
        return held_seconds if self.preparation is None else min(held_seconds, self.preparation.hold_seconds)

    @property
    def phase(self) -> OpenPhase:
        """What its trainer's next word is awaited for."""
        if self.held is not None:
            return "held"
        return "receiving" if self.preparation is None else "prepared"

    def as_held(self) -> RefitHeld:
        """What its trainer is told when only publishing is left."""
        assert self.held is not None
        return RefitHeld(refit=self.id, version=self.ticket.version, digest=combine_digests(self.held))

    def watch(self, deadline: asyncio.Task[Any]) -> None:
        self._deadline = deadline

    def unwatch(self) -> None:
        if self._deadline is not None and self._deadline is not asyncio.current_task():
            self._deadline.cancel()
        self._deadline = None


def nothing_begun() -> ProtocolError:
    return ProtocolError(ErrorCode.UNKNOWN_REFIT, "this session has begun no refit, or it was refused")


def unknown_refit(refit_id: int) -> ProtocolError:
    return ProtocolError(ErrorCode.UNKNOWN_REFIT, f"refit {refit_id} is not under way: it was ended, or never begun")
