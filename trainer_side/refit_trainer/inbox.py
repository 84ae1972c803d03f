"""Who waits for which reply. No I/O: the connection feeds it what arrives and tells it what broke."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import msgspec

from refit_protocol.codec import Frame
from refit_protocol.errors import ErrorCode, Fault
from refit_protocol.messages import (
    Failed,
    Generate,
    GenerationFinished,
    GenerationStarted,
    Reply,
    ReplyHeader,
    StreamCursor,
    TokenDelta,
    TokensGenerated,
)
from refit_trainer.errors import RefitdError, error_from
from refit_trainer.stream import Delta, cut, without_first

# What a consumer of one generation finds in its mailbox, in order; the last two end it.
Arrival = GenerationStarted | list[Delta] | GenerationFinished | RefitdError


class Mailbox(Protocol):
    """Where the loop's thread leaves what arrives for a consumer, which may live in another thread."""

    def put(self, arrival: Arrival) -> None: ...


@dataclass
class _Progress:
    """How far one output has come; `asked_from` is where it was when the daemon was asked to go on from there."""

    position: int = 0
    characters: int = 0
    asked_from: tuple[int, int] = (0, 0)
    has_gap: bool = False
    ended: bool = False

    def take(self, delta: Delta) -> None:
        self.position += len(delta.token_ids)
        self.characters += len(delta.text or "")
        self.ended = delta.finish_reason is not None
        self.has_gap = False


@dataclass
class Generation:
    """A `Generate` under way: where its tokens go, how far every output has come, and which have ended.

    `resuming`: the daemon is being asked, or soon will be, to go on from where its outputs are.
    """

    command: Generate
    blobs: Sequence[Frame]
    mailbox: Mailbox | None
    started: bool = False
    resuming: bool = False
    _clamped: frozenset[int] = frozenset()
    _outputs: dict[tuple[int, int], _Progress] = field(default_factory=dict)

    def resume(self) -> list[StreamCursor]:
        """Where the daemon has to go on; tokens that were sent before it does may come as well."""
        self.resuming = True
        for progress in self._outputs.values():
            progress.asked_from = progress.position, progress.characters
        return [
            StreamCursor(prompt=prompt, output=output, position=progress.position)
            for (prompt, output), progress in self._outputs.items()
            if progress.position
        ]

    @property
    def has_gap(self) -> bool:
        """Whether tokens were lost that have not come again."""
        return any(progress.has_gap for progress in self._outputs.values())

    def put(self, arrival: Arrival) -> None:
        if self.mailbox is not None:
            self.mailbox.put(arrival)

    def start(self, started: GenerationStarted) -> None:
        """A stream that is resumed from its beginning says again that it has started."""
        if not self.started:
            self.started = True
            self._clamped = frozenset(prompt for prompt, cut in enumerate(started.resolved.clamped) if cut)
            self.put(started)

    def advance(self, delta: Delta) -> Delta | None:
        """What of it is new: None where all has come before, or something is missing in front of it."""
        progress = self._progress(delta)
        known = progress.position - delta.position
        if known < 0 or (known > 0 and delta.text and delta.position != progress.asked_from[0]):
            progress.has_gap = True
            return None
        if known > 0:
            delta = without_first(delta, known, progress.characters - progress.asked_from[1])
        if progress.ended or not (len(delta.token_ids) or delta.finish_reason):
            return None
        progress.take(delta)
        if delta.finish_reason is not None and delta.prompt in self._clamped:
            return msgspec.structs.replace(delta, clamped=True)
        return delta

    def _progress(self, delta: Delta) -> _Progress:
        key = delta.prompt, delta.output
        if (known := self._outputs.get(key)) is not None:
            return known
        return self._outputs.setdefault(key, _Progress())


class Inbox:
    def __init__(self) -> None:
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[Reply]] = {}
        self.generations: dict[int, Generation] = {}
        # For the connection: to be acknowledged, and to be asked for again.
        self.finished: list[int] = []
        self.gaps: set[int] = set()

    @property
    def is_awaited(self) -> bool:
        """Whether something is still to come from the daemon."""
        return bool(self._answers or self.generations)

    def next_request(self) -> int:
        """The id of a request whose answer nobody waits for."""
        return next(self._ids)

    def expect_answer(self) -> tuple[int, asyncio.Future[Reply]]:
        """The id for a new request and the future of its one reply."""
        request = self.next_request()
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_noted)
        self._answers[request] = answer
        return request, answer

    def forget_answer(self, request: int) -> None:
        """A reply that comes later than this belongs to nobody."""
        self._answers.pop(request, None)

    def expect_generation(self, generation: Generation) -> int:
        request = self.next_request()
        self.generations[request] = generation
        return request

    def abandon(self, request: int) -> bool:
        """Nobody reads this generation any more; whether it is still under way."""
        generation = self.generations.get(request)
        if generation is None:
            return False
        generation.mailbox = None
        return True

    @property
    def abandoned(self) -> list[int]:
        return [request for request, generation in self.generations.items() if generation.mailbox is None]

    def forget_abandoned(self, request: int) -> None:
        """The daemon has ended it, and need not keep it either."""
        if self.generations.pop(request, None) is not None:
            self.finished.append(request)

    def abandon_all(self, error: RefitdError, *, resuming: bool = False) -> None:
        """Tells all consumers, or those whose tokens are asked for again, what they are not waiting for any more."""
        for generation in self.generations.values():
            if generation.resuming or not resuming:
                generation.put(error)
                generation.mailbox = None

    def deliver(self, header: ReplyHeader, blobs: Sequence[Frame]) -> None:
        if isinstance(header.body, TokensGenerated):
            self._deliver_tokens(header.body.deltas, blobs)
        elif (answer := self._answers.pop(header.id, None)) is not None:
            _settle(answer, header.body)
        elif header.id in self.generations:
            self._deliver_generation(header.id, header.body, blobs)

    def fail_answers(self, error: RefitdError) -> None:
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            _settle(answer, error)

    def fail_generations(self, error: RefitdError) -> int:
        """Their session is gone. How many consumers were told."""
        generations, self.generations = self.generations, {}
        self.finished.clear()
        for generation in generations.values():
            generation.put(error)
        return sum(generation.mailbox is not None for generation in generations.values())

    def fail_generation(self, request: int, error: RefitdError) -> None:
        if (generation := self.generations.pop(request, None)) is not None:
            generation.put(error)

    def _deliver_generation(self, request: int, body: Reply, blobs: Sequence[Frame]) -> None:
        generation = self.generations[request]
        if isinstance(body, GenerationStarted):
            generation.start(body)
        elif isinstance(body, GenerationFinished):
            self._deliver_tokens(body.deltas, blobs)
            # With what is missing its end comes again.
            if not generation.has_gap:
                self._end(request, body)
        elif isinstance(body, Failed):
            self._end(request, error_from(body))

    def _end(self, request: int, arrival: GenerationFinished | RefitdError) -> None:
        if (generation := self.generations.pop(request, None)) is not None:
            generation.put(arrival)
            self.finished.append(request)

    def _deliver_tokens(self, deltas: list[TokenDelta], blobs: Sequence[Frame]) -> None:
        arrived: dict[int, list[Delta]] = {}
        for described, delta in zip(deltas, cut(deltas, blobs), strict=True):
            if (new := self._advance(described.request, delta)) is not None:
                arrived.setdefault(described.request, []).append(new)
        for request, batch in arrived.items():
            self.generations[request].put(batch)

    def _advance(self, request: int, delta: Delta) -> Delta | None:
        generation = self.generations.get(request)
        if generation is None:
            return None
        new = generation.advance(delta)
        if new is None and generation.has_gap and not generation.resuming:
            generation.resuming = True
            self.gaps.add(request)
        return new


def protocol_broken(message: str) -> RefitdError:
    return RefitdError(f"the daemon broke the protocol: {message}", code=ErrorCode.INTERNAL, fault=Fault.DAEMON)


def _noted(answer: asyncio.Future[Reply]) -> None:
    """Who could not even send the request raises that, and never sees this error: asyncio is not to complain of it."""
    if not answer.cancelled():
        answer.exception()


def _settle(answer: asyncio.Future[Reply], outcome: Reply | RefitdError) -> None:
    if answer.done():
        return
    if isinstance(outcome, Failed):
        answer.set_exception(error_from(outcome))
    elif isinstance(outcome, RefitdError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
