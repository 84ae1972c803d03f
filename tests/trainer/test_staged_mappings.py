"""What a staging area gives a target from a mapping: packed by a plan that is kept from one refit to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from refit_protocol.messages import Manifest
from refit_protocol.tensors import TensorShape
from refit_trainer import LayoutMismatch
from refit_trainer.backends import Buckets
from refit_trainer.memory import MemfdMemory
from refit_trainer.packing import FilledBucket
from refit_trainer.packing_plan import PackingPlan
from refit_trainer.staging import Staging, Weights
from refit_trainer.steps import walk

BUCKET_BYTES = 256


class NotedMemory(MemfdMemory):
    """Says when a bucket has been packed."""

    events: list[str]

    def synchronise(self, segment: int | None = None) -> None:
        self.events.append(f"packed {segment}")


class Target:
    """Reads every bucket when it is told of it."""

    max_pieces = 4

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.tensors: dict[str, torch.Tensor] = {}
        self.pieces: list[tuple[str, int, int, int]] = []
        self._views: Any = None
        self.when_entered = lambda: None

    async def enter(self) -> None:
        self.when_entered()

    async def begin(self, buckets: Buckets, tensors: list[TensorShape], *_options: Any, **_partial: Any) -> None:
        self.events.append("begun")
        self._views = buckets.views
        self.tensors = {shape.name: torch.zeros(shape.shape, dtype=getattr(torch, shape.dtype)) for shape in tensors}
        self.pieces = []

    async def apply(self, filled: FilledBucket) -> None:
        self.events.append(f"applied {filled.bucket}")
        for piece in filled.pieces:
            self.pieces.append((piece.name, piece.first, piece.count, piece.offset_bytes))
            flat = self.tensors[piece.name].view(-1)[piece.first : piece.first + piece.count]
            view = self._views[filled.bucket]
            flat.copy_(view[piece.offset_bytes : piece.offset_bytes + flat.nbytes].view(flat.dtype))

    async def finish(self) -> None:
        self.events.append("finished")

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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"wide": torch.ones(9, 21)}, r"wide is float32 \[9, 21\], but float32 \[9, 20\] is expected"),
        ({"stranger": torch.ones(1)}, "stranger is not expected"),
        ({"last": torch.ones(31, dtype=torch.int8)}, r"last is int8 \[31\], but float32 \[31\] is expected"),
    ],
)
def test_what_changes_while_the_role_is_waited_for_is_refused(
    staging: Staging, target: Target, change: dict[str, torch.Tensor], says: str
) -> None:
    """By name, also where a plan for what was announced is there already."""
    weights = weights_of(0)
    refit(staging, target, weights)
    target.when_entered = lambda: weights.update(change)
    with pytest.raises(LayoutMismatch, match=says):
        refit(staging, target, weights)
    assert "aborted" in target.events


def test_tensor_taken_away_while_the_role_is_waited_for_is_missed(staging: Staging, target: Target) -> None:
    """It was announced."""
    weights = weights_of(0)
    target.when_entered = lambda: weights.__delitem__("small")
    with pytest.raises(LayoutMismatch, match="ended without small"):
        refit(staging, target, weights)


def test_one_bucket_is_packed_before_the_gate_closes(staging: Staging, target: Target) -> None:
    """On a CPU the next one is packed while the first is read."""
    refit(staging, target, {name: torch.ones(64) for name in "abc"})
    assert target.events == [
        *("packed 0", "begun", "applied 0"),
        *("packed 1", "applied 1", "packed 0", "applied 0", "finished"),
    ]


def test_where_packing_costs_no_time_all_buckets_are_packed_before_the_gate_closes(
    staging: Staging, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. None is packed again before it has been read."""
    monkeypatch.setattr(PackingPlan, "ahead", 2)
    weights = {name: torch.randn(64) for name in "abcd"}
    refit(staging, target, weights)
    assert target.events == [
        *("packed 0", "packed 1", "begun", "applied 0", "applied 1"),
        *("packed 0", "applied 0", "packed 1", "applied 1", "finished"),
    ]
    assert same(target.tensors, weights)
