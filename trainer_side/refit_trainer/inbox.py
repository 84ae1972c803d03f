"""Who waits for which reply. No I/O: the connection feeds it what arrives and tells it what broke."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

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
from refit_trainer.stream import Delta, cut

# What a consumer of one generation finds in its mailbox, in order; the last two end it.
Arrival = GenerationStarted | list[Delta] | GenerationFinished | RefitdError


class Mailbox(Protocol):
    """Where the loop's thread leaves what arrives for a consumer, which may live in another thread."""

    def put(self, arrival: Arrival) -> None: ...


@dataclass
class Generation:
    """A `Generate` under way: where its tokens go, how far every output has come, and which have ended."""

    command: Generate
    blobs: Sequence[Frame]
    mailbox: Mailbox | None
    positions: dict[tuple[int, int], int] = field(default_factory=dict)
    ended: set[tuple[int, int]] = field(default_factory=set)

    @property
    def cursors(self) -> list[StreamCursor]:
        return [
            StreamCursor(prompt=prompt, output=output, position=position)
            for (prompt, output), position in self.positions.items()
        ]

    def put(self, arrival: Arrival) -> None:
        if self.mailbox is not None:
            self.mailbox.put(arrival)

    def advance(self, delta: TokenDelta) -> bool:
        """False for the end of an output that has come before, as after a reconnect; raises ValueError where tokens are
        missing or come twice.
        """
        key = (delta.prompt, delta.output)
        expected = self.positions.get(key, 0)
        if delta.position != expected:
            raise ValueError(f"prompt {key[0]}, output {key[1]}: tokens from {delta.position} came after {expected}")
        self.positions[key] = expected + delta.count
        if key in self.ended:
            return False
        if delta.finish_reason is not None:
            self.ended.add(key)
        return True


class Inbox:
    def __init__(self) -> None:
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[Reply]] = {}
        self.generations: dict[int, Generation] = {}
        self.finished: list[int] = []

    def next_request(self) -> int:
        """The id of a request whose answer nobody waits for."""
        return next(self._ids)

    def expect_answer(self) -> tuple[int, asyncio.Future[Reply]]:
        """The id for a new request and the future of its one reply."""
        request = self.next_request()
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
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
        """How many consumers were told."""
        generations, self.generations = self.generations, {}
        for generation in generations.values():
            generation.put(error)
        return sum(generation.mailbox is not None for generation in generations.values())

    def fail_generation(self, request: int, error: RefitdError) -> None:
        if (generation := self.generations.pop(request, None)) is not None:
            generation.put(error)

    def _deliver_generation(self, request: int, body: Reply, blobs: Sequence[Frame]) -> None:
        generation = self.generations[request]
        if isinstance(body, GenerationStarted):
            generation.put(body)
        elif isinstance(body, GenerationFinished):
            self._deliver_tokens(body.deltas, blobs)
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
            if self._advance(described):
                arrived.setdefault(described.request, []).append(delta)
        for request, batch in arrived.items():
            if (generation := self.generations.get(request)) is not None:
                generation.put(batch)

    def _advance(self, delta: TokenDelta) -> bool:
        generation = self.generations.get(delta.request)
        if generation is None:
            return False
        try:
            return generation.advance(delta)
        except ValueError as error:
            self.fail_generation(delta.request, protocol_broken(str(error)))
            return False


def protocol_broken(message: str) -> RefitdError:
    return RefitdError(f"the daemon broke the protocol: {message}", code=ErrorCode.INTERNAL, fault=Fault.DAEMON)


def _settle(answer: asyncio.Future[Reply], outcome: Reply | RefitdError) -> None:
    if answer.done():
        return
    if isinstance(outcome, Failed):
        answer.set_exception(error_from(outcome))
    elif isinstance(outcome, RefitdError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
