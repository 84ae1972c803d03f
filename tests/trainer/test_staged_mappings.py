"""What a staging area gives a target from a mapping: packed by a plan that is kept from one refit to the next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import Manifest
from refit_protocol.tensors import TensorShape
from refit_trainer.backends import Buckets
from refit_trainer.errors import RefitdError, RequestTimedOut
from refit_trainer.memory import MemfdMemory
from refit_trainer.packing import Ahead, FilledBucket
from refit_trainer.packing_plan import MemoryCopies, PackingPlan
from refit_trainer.staging import Staging, Weights, _Turn
from refit_trainer.steps import walk
from tests.trainer.background import in_background

BUCKET_BYTES = 256


class NotedMemory(MemfdMemory):
    """Says when a bucket has been packed."""

    events: list[str]

    def synchronise(self, segment: int | None = None) -> None:
        self.events.append(f"packed {segment}")


class Target:
    """Reads every bucket when it is told of it."""

    max_pieces = 4
    may_begin_again = True

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.tensors: dict[str, torch.Tensor] = {}
        self.pieces: list[tuple[str, int, int, int]] = []
        self._views: Any = None
        self.when_entered = lambda: None

    async def enter(self) -> None:
        self.when_entered()

    async def begin(
        self,
        buckets: Buckets,
        tensors: list[TensorShape],
        *_options: Any,
        ahead: Ahead,
        **_partial: Any,
    ) -> None:
        self.events.append("begun")
        self._views = buckets.views
        self.tensors = {shape.name: torch.zeros(shape.shape, dtype=getattr(torch, shape.dtype)) for shape in tensors}
        self.pieces = []
        try:
            for filled in await ahead():
                await self.apply(filled)
        except asyncio.CancelledError:
            self.events.append("ended early")
            raise

    async def apply(self, filled: FilledBucket) -> None:
        self.events.append(f"applied {filled.bucket}")
        for piece in filled.pieces:
            self.pieces.append((piece.name, piece.first, piece.count, piece.offset_bytes))
            flat = self.tensors[piece.name].view(-1)[piece.first : piece.first + piece.count]
            view = self._views[filled.bucket]
            flat.copy_(view[piece.offset_bytes : piece.offset_bytes + flat.nbytes].view(flat.dtype))

    async def finish(self) -> None:
        self.events.append("finished")

    def is_done(self) -> bool:
        return False

    def coming(self, _answer: object) -> None:
        raise AssertionError("it is never done before it is finished")

    async def abort(self, _error: BaseException) -> None:
        self.events.append("aborted")

    async def leave(self) -> None: ...


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """Buckets note in its `events` when they are packed."""
    events: list[str] = []
    monkeypatch.setattr(NotedMemory, "events", events, raising=False)
    monkeypatch.setattr("refit_trainer.memory.MemfdMemory", NotedMemory)
    return Target(events)


@pytest.fixture
def staging() -> Iterator[Staging]:
    area = Staging(BUCKET_BYTES)
    yield area
    area.close()


async def no_manifest() -> Manifest:
    raise AssertionError("a mapping shows what it brings")


def refit(staging: Staging, target: Target, weights: Weights, only: list[str] | None = None) -> None:
    asyncio.run(walk(staging.refit(target, weights, None, only, {}, no_manifest)))


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "wide": torch.randn(9, 20),
        "turned": torch.randn(6, 5).t(),
        "small": torch.randn(3).to(torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.randn(40)),
        "last": torch.randn(31),
    }


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_refit_brings_the_present_values(staging: Staging, target: Target) -> None:
    """Changed in place, replaced by other tensors, of another layout, in another order, and the first ones again; the
    pieces are those that the same tensors from an iterator would be cut into."""
    first, second = weights_of(0), weights_of(1)
    fewer = {name: second[name] for name in ("turned", "last", "wide")}
    grown = first | {"last": torch.randn(200)}
    for weights in (first, first, second, fewer, grown, dict(reversed(first.items())), first):
        refit(staging, target, weights)
        assert same(target.tensors, weights)
        planned = target.pieces
        refit(staging, target, MappingProxyType(weights))
        assert target.pieces == planned
        with torch.no_grad():
            weights["wide"].add_(1)


def test_part_of_a_mapping(staging: Staging, target: Target) -> None:
    """The selected ones alone, in the mapping's order; the whole of it before and after."""
    weights = weights_of(0)
    for only in (None, ["last", "turned"], None, ["last", "turned"]):
        refit(staging, target, weights, only)
        assert same(target.tensors, {name: weights[name] for name in only or weights})


@pytest.mark.parametrize("only", [None, ["wide", "small", "last"]])
def test_what_is_given_at_the_call_is_what_comes(staging: Staging, target: Target, only: list[str] | None) -> None:
    """Whatever happens to the mapping while the role is waited for: tensors replaced, added and taken away."""
    weights = weights_of(0)
    given = {name: weights[name] for name in only or weights}

    def change() -> None:
        weights.update({"wide": torch.ones(9, 21), "stranger": torch.ones(1)})
        del weights["small"]

    refit(staging, target, weights)
    target.when_entered = change
    refit(staging, target, weights, only)
    assert same(target.tensors, given)


def test_refits_of_two_threads_take_turns(staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one's tensors are not packed before the first has ended, and each brings its own."""
    first, second, later = weights_of(0), weights_of(1), Target(target.events)
    refit(staging, target, first)
    alone = [*target.events]
    target.events.clear()
    waits, wait = threading.Event(), _Turn.wait

    async def noted(turn: _Turn, timeout_seconds: float | None) -> None:
        waits.set()
        await wait(turn, timeout_seconds)

    monkeypatch.setattr(_Turn, "wait", noted)
    threads = []

    def begin_another() -> None:
        threads.append(in_background(refit, staging, later, second))
        assert waits.wait(30)

    target.when_entered = begin_another
    refit(staging, target, first)
    [(thread, outcome)] = threads
    thread.join()
    assert outcome == [None]
    assert target.events == alone + alone
    assert same(target.tensors, first)
    assert same(later.tensors, second)


def test_who_stops_waiting_for_its_turn_leaves_it_to_others(staging: Staging, target: Target) -> None:
    """A cancelled refit that has never had the buckets: the next one gets them."""

    async def scenario() -> None:
        with staging._in_use:
            waiting = asyncio.create_task(walk(staging.refit(target, weights_of(0), None, None, {}, no_manifest)))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert waiting.cancelled()
        await walk(staging.refit(target, weights_of(1), None, None, {}, no_manifest))

    asyncio.run(scenario())
    assert same(target.tensors, weights_of(1))


def test_a_turn_is_waited_for_no_longer_than_the_refits_deadline(staging: Staging, target: Target) -> None:
    """As where an iterator that is being packed refits by its own client: that turn never comes."""
    with staging._in_use, pytest.raises(RequestTimedOut, match="another refit has filled the buckets"):
        asyncio.run(walk(staging.refit(target, weights_of(0), None, None, {"deadline_seconds": 0.01}, no_manifest)))
    refit(staging, target, weights_of(1))
    assert same(target.tensors, weights_of(1))


def test_what_is_given_is_what_comes_after_another_ones_turn(staging: Staging, target: Target) -> None:
    """Whatever happens to the mapping while the buckets are waited for."""
    weights = weights_of(0)

    async def scenario() -> None:
        with staging._in_use:
            waiting = asyncio.create_task(walk(staging.refit(target, weights, None, None, {}, no_manifest)))
            await asyncio.sleep(0)
            weights.clear()
        await waiting

    asyncio.run(scenario())
    assert same(target.tensors, weights_of(0))


def test_buckets_are_made_anew_after_an_interrupt(
    staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came when they had been made, but not yet what is placed in them."""

    def interrupted(_views: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as interrupting:
        interrupting.setattr("refit_trainer.staging.Places", interrupted)
        with pytest.raises(InterruptedError):
            refit(staging, target, weights_of(0))
    refit(staging, target, weights_of(0))
    assert same(target.tensors, weights_of(0))


def test_one_bucket_is_packed_before_the_gate_closes(staging: Staging, target: Target) -> None:
    """On a CPU the next one is packed while the first is read."""
    refit(staging, target, {name: torch.ones(64) for name in "abc"})
    assert target.events == [
        *("packed 0", "begun", "applied 0"),
        *("packed 1", "applied 1", "packed 0", "applied 0", "finished"),
    ]


def test_where_packing_is_only_enqueued_the_gate_closes_meanwhile(
    staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: all buckets are packed before the first is read, and none again before it has been."""
    monkeypatch.setattr(PackingPlan, "ahead", 2)
    weights = {name: torch.randn(64) for name in "abcd"}
    refit(staging, target, weights)
    assert target.events == [
        *("begun", "packed 0", "packed 1", "applied 0", "applied 1"),
        *("packed 0", "applied 0", "packed 1", "applied 1", "finished"),
    ]
    assert same(target.tensors, weights)


def test_like_the_last_time_it_is_begun_before_all_tensors_are_looked_at(
    staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the first bucket, which the GPU packs meanwhile."""
    monkeypatch.setattr(PackingPlan, "ahead", 2)
    weights = {name: torch.randn(64) for name in "abcd"}
    refit(staging, target, weights)
    target.events.clear()
    for tensor in weights.values():
        tensor.add_(1)
    refit(staging, target, weights)
    assert target.events == [
        *("packed 0", "begun", "packed 1", "applied 0", "applied 1"),
        *("packed 0", "applied 0", "packed 1", "applied 1", "finished"),
    ]
    assert same(target.tensors, weights)


@pytest.mark.parametrize("changed", "abd")
def test_what_was_begun_for_other_shapes_is_aborted(
    staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Before anything of it was read, and begun anew with the shapes that there are; where the first bucket shows it,
    only with those."""
    monkeypatch.setattr(PackingPlan, "ahead", 2)
    weights = {name: torch.randn(64) for name in "abcd"}
    refit(staging, target, weights)
    target.events.clear()
    weights[changed] = torch.randn(48)
    refit(staging, target, weights)
    assert same(target.tensors, weights)
    before_it = target.events[: target.events.index("aborted")]
    assert "begun" in before_it or changed == "a"
    assert not [event for event in before_it if event.startswith("applied")]
    assert [event for event in target.events if event in ("begun", "finished")][-2:] == ["begun", "finished"]


def test_what_was_refused_for_shapes_that_are_there_no_more_is_begun_anew(
    staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake that was mended since: only what there is counts."""
    monkeypatch.setattr(PackingPlan, "ahead", 2)
    begin = target.begin

    async def particular(buckets: Buckets, tensors: list[TensorShape], *options: Any, **others: Any) -> None:
        if tensors[-1].shape != (64,):
            raise RefitdError("not the engine's shape", code=ErrorCode.MANIFEST_MISMATCH)
        await begin(buckets, tensors, *options, **others)

    monkeypatch.setattr(target, "begin", particular)
    weights = {name: torch.randn(64) for name in "abcd"}
    for _ in range(2):
        with pytest.raises(RefitdError, match="not the engine's shape"):
            refit(staging, target, weights | {"d": torch.randn(48)})
    refit(staging, target, weights)
    assert same(target.tensors, weights)


def test_a_target_that_cannot_begin_again_is_told_of_what_was_seen(
    staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As several daemons at once: nothing is begun that may have to be aborted."""
    monkeypatch.setattr(PackingPlan, "ahead", 2)
    monkeypatch.setattr(target, "may_begin_again", False)
    weights = {name: torch.randn(64) for name in "abcd"}
    for present in (weights, weights | {"d": torch.randn(48)}):
        refit(staging, target, present)
        assert same(target.tensors, present)
    assert "aborted" not in target.events


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.randn(32)},
        {"a": torch.randn(8, 8).t()},
        {"a": torch.arange(64)},
        {"a": torch.nn.Parameter(torch.randn(64))},
        {"d": torch.randn(200)},
        {"e": torch.randn(3)},
    ],
    ids=["shape", "strides", "dtype", "kind", "another one", "one more"],
)
def test_what_has_changed_since_is_packed_as_it_is(
    staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch, change: dict[str, torch.Tensor]
) -> None:
    """Whether it shows in the first bucket or behind it, and whether another plan is needed."""
    monkeypatch.setattr(PackingPlan, "ahead", 2)
    weights = {name: torch.randn(64) for name in "abcd"}
    for present in (weights, weights | change, weights):
        refit(staging, target, present)
        assert same(target.tensors, present)


def test_what_is_no_tensor_is_told_from_one(staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind tensors that a plan could pack."""
    monkeypatch.setattr(PackingPlan, "ahead", 2)
    weights: dict[str, Any] = {name: torch.randn(64) for name in "abcd"}
    refit(staging, target, weights)
    with pytest.raises(TypeError, match="a refit takes"):
        refit(staging, target, {**weights, "a": torch.randn(64), "d": 1.0})
    refit(staging, target, weights)
    assert same(target.tensors, weights)


def test_a_cancellation_of_the_clean_up_leaves_the_target(
    staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a second Ctrl-C does, while what was begun is being ended: the next refit does not wait for ever."""
    monkeypatch.setattr(PackingPlan, "ahead", 2)
    refitting: asyncio.Task[None]

    def fail(_memory: NotedMemory, _segment: int | None = None) -> None:
        raise OSError("no device")

    async def begin(*_announced: Any, **_options: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            refitting.cancel()

    async def leave() -> None:
        target.events.append("left")

    monkeypatch.setattr(NotedMemory, "synchronise", fail)
    monkeypatch.setattr(target, "begin", begin)
    monkeypatch.setattr(target, "leave", leave)

    async def scenario() -> None:
        nonlocal refitting
        refitting = asyncio.create_task(walk(staging.refit(target, weights_of(0), None, None, {}, no_manifest)))
        await asyncio.wait([refitting])
        assert refitting.cancelled()

    asyncio.run(scenario())
    assert target.events == ["aborted", "left"]


def test_an_interrupt_while_the_copies_are_aimed_is_forgotten(
    staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that waits for the trainer's stream: what lies where it did the last time is copied from there."""
    first, moved = weights_of(0), weights_of(1)
    aim = MemoryCopies.aim

    def interrupted(copies: MemoryCopies, addresses: Sequence[int]) -> None:
        aim(copies, addresses)
        raise InterruptedError

    refit(staging, target, first)
    with monkeypatch.context() as interrupting:
        interrupting.setattr(MemoryCopies, "aim", interrupted)
        with pytest.raises(InterruptedError):
            refit(staging, target, moved)
    refit(staging, target, first)
    assert same(target.tensors, first)


def test_a_failure_to_pack_ends_what_was_begun_meanwhile(
    staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning, which waits for buckets that never come, is over before the target is told to abort."""
    monkeypatch.setattr(PackingPlan, "ahead", 2)

    def fail(_memory: NotedMemory, _segment: int | None = None) -> None:
        raise OSError("no device")

    with monkeypatch.context() as broken:
        broken.setattr(NotedMemory, "synchronise", fail)
        with pytest.raises(OSError, match="no device"):
            refit(staging, target, weights_of(0))
    assert target.events == ["begun", "ended early", "aborted"]
    refit(staging, target, weights_of(1))
    assert same(target.tensors, weights_of(1))
