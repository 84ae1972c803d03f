"""One batch on a fleet: placed, renumbered, checked for its version, and moved where a daemon ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import GenerationFinished, GenerationStarted, ResolvedSampling, Status
from refit_trainer.errors import (
    DaemonRestarted,
    DaemonUnreachable,
    MemberLost,
    NoMember,
    RefitdError,
    RequestTimedOut,
    SessionLost,
    VersionsMixed,
)
from refit_trainer.fleet.members import Member, Members
from refit_trainer.fleet.order import Order, Output, Part
from refit_trainer.fleet.routing import Router
from refit_trainer.inbox import Arrival, Mailbox
from refit_trainer.replies import TaskMailbox, with_grace
from refit_trainer.stream import Delta

# What ends a request for the daemon's own sake: another daemon can serve it.
_DAEMON_ENDED = frozenset(
    {ErrorCode.ENGINE_DEAD, ErrorCode.TORN, ErrorCode.DRAINING, ErrorCode.LOADING, ErrorCode.ASLEEP}
)
_NOT_THERE = (DaemonUnreachable, DaemonRestarted, SessionLost)
# How often one output is asked for elsewhere before its error is told.
_MOVES = 3


@dataclass(frozen=True)
class _Lost:
    """What ended with a daemon, and is not made again elsewhere."""

    endpoint: str
    prompts: frozenset[int]
    why: RefitdError | None


class Batch:
    """Lives from the caller's request to the last output; belongs to one task of the event loop."""

    def __init__(self, order: Order, members: Members, router: Router, mailbox: Mailbox, probe_seconds: float) -> None:
        self._order = order
        self._members = members
        self._router = router
        self._mailbox = mailbox
        self._probe_seconds = probe_seconds
        self._version: int | None = None
        self._context_tokens = members.context_tokens
        self._begun = time.monotonic()
        self._first_token: float | None = None
        self._generated = 0
        self._done: set[Output] = set()
        self._delivering: set[Output] = set()
        self._placed: dict[Output, str] = {}
        self._open: dict[Output, list[Delta]] = {}
        self._undelivered: dict[Output, RefitdError] = {}
        # What a daemon that ended gave of an output, for where no other one makes it.
        self._kept: dict[Output, list[Delta]] = {}
        self._resolved: dict[int, tuple[int, bool, int]] = {}
        self._common: ResolvedSampling | None = None
        self._asked: dict[tuple[Member, int], Part] = {}
        self._lost: list[_Lost] = []
        self._cancelled = False
        self._cancel_seconds = 0.0

    async def run(self) -> None:
        """Raises what ends the batch; what has been delivered by then stays."""
        if not self._order.prompts:
            raise RefitdError("there is not one prompt", code=ErrorCode.INVALID_PROMPT)
        if not self._order.mixed:
            self._version = await self._pinned()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                await self._place(self._order.everything)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            # Also of tasks that were cancelled before they had begun.
            self._release([*self._placed])
        if self._lost:
            raise _member_lost(self._lost)
        self._mailbox.put(self._finished())

    async def cancel(self, timeout_seconds: float) -> None:
        """Outputs under way end with what they have; what no daemon has been asked for yet is cancelled there."""
        self._cancelled = True
        self._cancel_seconds = timeout_seconds
        asked = [
            member.daemon.connection.cancel(request, timeout_seconds=timeout_seconds) for member, request in self._asked
        ]
        await asyncio.gather(*asked, return_exceptions=True)

    # --- placing ---

    async def _pinned(self) -> int:
        version = await self._members.newest_version(self._probe_seconds)
        wanted = (self._order.options.get("min_version") or 0) - (self._order.options.get("max_version_lag") or 0)
        if version < wanted:
            raise RefitdError(
                f"the fleet serves version {version}, not yet {wanted}",
                code=ErrorCode.VERSION_UNAVAILABLE,
                retryable=True,
                details={"version": version},
            )
        return version

    async def _place(self, part: Part) -> None:
        """Starts a task for every daemon that gets some of it."""
        serving = await self._members.serving(self._probe_seconds, self._version)
        others = {name: self._sequences_of_others(name, status) for name, status in serving.items()}
        shares: dict[str, list[int]] = {name: [] for name in serving}
        for prompt in part.prompts:
            tokens = self._tokens(prompt)
            # Others' sequences are thought to be like ours.
            foreign = {name: sequences * tokens for name, sequences in others.items()}
            key = self._order.routing_key(prompt)
            name = self._router.place(key, tokens * part.outputs, [*serving], foreign)
            self._router.add(name, tokens * part.outputs, part.outputs)
            shares[name].append(prompt)
        for name, prompts in shares.items():
            if prompts:
                share = Part(tuple(prompts), part.first_output, part.outputs, part.moves)
                self._placed.update(dict.fromkeys(share.keys, name))
                self._group.create_task(self._ask(self._members[name], share))

    def _release(self, outputs: Iterable[Output]) -> None:
        """Their daemon owes them no more."""
        for key in outputs:
            if (name := self._placed.pop(key, None)) is not None:
                self._router.add(name, -self._tokens(key[0]), -1)

    def _tokens(self, prompt: int) -> int:
        """Of one output."""
        return self._order.tokens(prompt, self._context_tokens)

    def _sequences_of_others(self, name: str, status: Status) -> int:
        sequences = status.running_requests + status.waiting_requests - self._router.load(name).sequences
        return max(sequences, 0)

    # --- one daemon's part ---

    async def _ask(self, member: Member, part: Part) -> None:
        why: RefitdError | None = None
        try:
            await self._read(member, part)
        except RefitdError as error:
            if not _may_be_served_elsewhere(error):
                raise _renumbered(error, part) from error
            why = error
        finally:
            self._release(part.keys)
        await self._move(member, part, why)

    async def _move(self, member: Member, part: Part, why: RefitdError | None) -> None:
        """Asks elsewhere for what did not come. Of a cancelled batch it is cancelled there, so that it has an end."""
        why = why or next((self._undelivered[key] for key in part.keys if key in self._undelivered), None)
        # To be told when everything else has come.
        if begun := [key for key in part.keys if key in self._delivering]:
            self._lost.append(_Lost(member.endpoint, frozenset(prompt for prompt, _ in begun), why))
        left = [*part.without({*self._done, *begun})]
        for key in part.keys:
            self._open.pop(key, None)
        for rest in left:
            try:
                if rest.moves > _MOVES:
                    raise NoMember(f"{member.endpoint} did not answer all that it was asked for")
                await self._place(rest)
            except NoMember as nobody:
                if not self._gave_what_is_kept(rest):
                    raise (why or nobody) from nobody

    def _gave_what_is_kept(self, part: Part) -> bool:
        """Nobody makes it whole: as with one daemon the reader is told how far each of its outputs came, and why."""
        if not all(key in self._kept for key in part.keys):
            return False
        self._done.update(part.keys)
        self._deliver([delta for key in part.keys for delta in self._kept[key]])
        return True

    async def _read(self, member: Member, part: Part) -> None:
        remaining_seconds = self._remaining_seconds
        command, blobs = self._order.command(part, self._version, remaining_seconds)
        mailbox = TaskMailbox(with_grace(remaining_seconds))
        connection = member.daemon.connection
        request = await member.daemon.send_generate(command, blobs, mailbox)
        self._asked[member, request] = part
        try:
            if self._cancelled:
                await connection.cancel(request, timeout_seconds=self._cancel_seconds)
            while True:
                arrival = await self._next(mailbox)
                if isinstance(arrival, RefitdError):
                    raise arrival
                if isinstance(arrival, GenerationFinished):
                    return
                if isinstance(arrival, GenerationStarted):
                    self._note_started(part, arrival)
                else:
                    self._take(member, part, arrival)
        finally:
            del self._asked[member, request]
            mailbox.close()
            connection.abandon(request)

    async def _next(self, mailbox: TaskMailbox) -> Arrival:
        try:
            return await mailbox.get()
        except TimeoutError:
            raise RequestTimedOut("the batch did not end in time") from None

    @property
    def _remaining_seconds(self) -> float | None:
        seconds = self._order.reading.deadline_seconds
        return None if seconds is None else max(self._begun + seconds - time.monotonic(), 0.001)

    # --- what comes ---

    def _take(self, member: Member, part: Part, deltas: list[Delta]) -> None:
        ready: list[Delta] = []
        for delta in deltas:
            prompt, output = key = part.key_of(delta.prompt, delta.output)
            renumbered = msgspec.structs.replace(delta, prompt=prompt, output=output)
            ready += self._deliverable(member, key, renumbered)
            if delta.finish_reason is not None:
                self._release([key])
        self._deliver(ready)

    def _deliver(self, deltas: list[Delta]) -> None:
        if deltas:
            self._first_token = self._first_token or time.monotonic()
            self._generated += sum(len(delta.token_ids) for delta in deltas)
            self._mailbox.put(deltas)

    def _deliverable(self, member: Member, key: Output, delta: Delta) -> list[Delta]:
        """With `whole` all of an output that is finished and as it should be; else each delta as it comes."""
        if not self._order.whole:
            return self._streamed(member, key, delta)
        self._open.setdefault(key, []).append(delta)
        if delta.finish_reason is None:
            return []
        collected = self._open.pop(key)
        if not self._is_pure(collected):
            self._undelivered[key] = self._mixed(member, Part((key[0],), key[1], 1))
        elif delta.error in _DAEMON_ENDED:
            self._undelivered[key] = _gave_up(member, delta)
            self._kept[key] = collected
        else:
            self._done.add(key)
            return collected
        return []

    def _streamed(self, member: Member, key: Output, delta: Delta) -> list[Delta]:
        deltas = self._last_words(member, key, delta) if delta.error in _DAEMON_ENDED else [delta]
        if not self._is_pure(deltas):
            raise self._mixed(member, Part((key[0],), key[1], 1))
        for each in deltas:
            self._note_delivered(key, each)
        return deltas

    def _last_words(self, member: Member, key: Output, delta: Delta) -> list[Delta]:
        """What a daemon that ends says of an output: nothing of one that was not begun, for another daemon makes it."""
        begun = key in self._delivering
        if begun and self._order.reading.incomplete == "yield":
            return [delta]
        self._undelivered[key] = _gave_up(member, delta)
        if not begun and self._is_pure([delta]):
            self._kept[key] = [delta]
        if not begun or not len(delta.token_ids):
            return []
        # Its end is told by `MemberLost`, when everything else has come.
        return [msgspec.structs.replace(delta, finish_reason=None, error=None)]

    def _note_delivered(self, key: Output, delta: Delta) -> None:
        if delta.finish_reason is None:
            self._delivering.add(key)
        else:
            self._delivering.discard(key)
            self._done.add(key)

    def _is_pure(self, deltas: list[Delta]) -> bool:
        """Whether all tokens were made by the version that the batch is pinned to."""
        return self._version is None or all(
            run.version == self._version for delta in deltas for run in delta.versions if run.count
        )

    def _note_started(self, part: Part, started: GenerationStarted) -> None:
        resolved = started.resolved
        self._common = resolved
        for index, prompt in enumerate(part.prompts):
            known = resolved.max_tokens[index], resolved.clamped[index], started.prompt_lengths[index]
            self._resolved[prompt] = known
        if len(self._resolved) == len(self._order.prompts):
            self._mailbox.put(GenerationStarted(resolved=self._all_resolved(), prompt_lengths=self._lengths()))

    def _all_resolved(self) -> ResolvedSampling:
        assert self._common is not None, "something was started"
        prompts = [self._resolved[prompt] for prompt in range(len(self._order.prompts))]
        return msgspec.structs.replace(
            self._common, max_tokens=[known[0] for known in prompts], clamped=[known[1] for known in prompts]
        )

    def _lengths(self) -> list[int]:
        return [self._resolved[prompt][2] for prompt in range(len(self._order.prompts))]

    def _finished(self) -> GenerationFinished:
        ended = time.monotonic()
        return GenerationFinished(
            deltas=[],
            outputs=len(self._done),
            prompt_tokens=sum(self._lengths()),
            generated_tokens=self._generated,
            resolved=self._all_resolved(),
            first_token_milliseconds=((self._first_token or ended) - self._begun) * 1e3,
            total_milliseconds=(ended - self._begun) * 1e3,
        )

    def _mixed(self, member: Member, part: Part) -> VersionsMixed:
        return VersionsMixed(
            f"{member.endpoint} changed its weights under a batch of version {self._version}; "
            "allow_mixed_versions=True takes what comes",
            details={"endpoint": member.endpoint, "version": self._version, "prompts": list(part.prompts)},
        )


def _may_be_served_elsewhere(error: RefitdError) -> bool:
    return isinstance(error, _NOT_THERE) or error.code in _DAEMON_ENDED


def _renumbered(error: RefitdError, part: Part) -> RefitdError:
    """A daemon counts the prompts that it was given."""
    prompt = error.details.get("prompt")
    if not isinstance(prompt, int):
        return error
    number = part.prompts[prompt]
    return RefitdError(
        f"prompt {number} of the batch: {error.message}",
        code=error.code,
        fault=error.fault,
        retryable=error.retryable,
        details={**error.details, "prompt": number},
    )


def _gave_up(member: Member, delta: Delta) -> RefitdError:
    return RefitdError(f"{member.endpoint} gave up on it", code=delta.error)


def _member_lost(lost: Sequence[_Lost]) -> MemberLost:
    """Of all that ended: the first one's reason, everybody's prompts."""
    first = lost[0]
    prompts = sorted(frozenset[int]().union(*(each.prompts for each in lost)))
    others = "" if len(lost) == 1 else f", and {len(lost) - 1} more such ends"
    return MemberLost(
        f"{first.endpoint} ended ({first.why}){others}: prompts {prompts} were not answered to their end",
        code=None if first.why is None else first.why.code,
        details={"endpoint": first.endpoint, "prompts": prompts},
    )
