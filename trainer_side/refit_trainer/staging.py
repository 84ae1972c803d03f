"""Refits through staging buckets: opened once, some packed while others are being read."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from refit_protocol.messages import Manifest
from refit_protocol.tensors import TensorShape, aligned
from refit_trainer.backends import Buckets, backend_for
from refit_trainer.bucket_target import Beginning, BucketTarget, sent
from refit_trainer.daemon_refit import AWAKE_SECONDS
from refit_trainer.errors import RequestTimedOut, UsedAfterFork
from refit_trainer.layouts import (
    Layout,
    MappingLayout,
    NamedTensor,
    announced,
    check_selection,
    layout_of,
    named_pairs,
    predicted_layout,
    selected,
    without_aliases,
)
from refit_trainer.packing import ALIGNMENT_BYTES, FilledBucket, Places, pack, share_bytes
from refit_trainer.packing_plan import PackingPlan
from refit_trainer.refits import CommitOptions
from refit_trainer.steps import Soon, Started, Steps, ending

# A GPU lets two processes take turns, and each change takes it time: most is gained where one turn is all buckets.
BUCKETS = {"cpu": 2, "cuda": 4}
# Half of the memory of all buckets, where nothing else is said.
DEFAULT_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
# How often a refit that waits for another one's end looks.
_LOOK_SECONDS = 0.001
NOTHING = "there is not one tensor to refit with: an iterator may have been used up before"

# A dict holds its tensors; any other mapping may make them when it is asked for them, like an iterator.
Coming: TypeAlias = dict[str, torch.Tensor] | Iterator[NamedTensor]
Weights: TypeAlias = Mapping[str, torch.Tensor] | Iterable[NamedTensor]
AskManifest: TypeAlias = Callable[[], Coroutine[Any, Any, Manifest]]

_Report = TypeVar("_Report")


class _OthersHaveComeError(Exception):
    """A mapping does not hold what was presumed of it."""


class _Planned(NamedTuple):
    layout: Layout
    max_pieces: int
    plan: PackingPlan


class Staging:
    """The buckets, how a mapping is packed into them, and the layout that iterators are known to yield."""

    def __init__(self, bucket_bytes: int | None) -> None:
        self._pid = os.getpid()
        self._bucket_bytes = bucket_bytes
        self._buckets: Buckets | None = None
        self._places = Places([])
        self._planned: _Planned | None = None
        self._held = MappingLayout()
        self._learned: Layout = {}
        # False where the last refit that sent some was not committed.
        self._are_read = True
        self._in_use = threading.Lock()

    def close(self) -> None:
        if self._buckets is not None:
            self._places, self._planned = Places([]), None
            self._buckets.close()
            self._buckets = None

    def refit(
        self,
        target: BucketTarget[_Report],
        weights: Weights,
        specs: Sequence[TensorShape] | None,
        only: list[str] | None,
        options: CommitOptions,
        manifest: AskManifest,
    ) -> Steps[_Report]:
        """Packs, sends and commits. Whatever ends it early, the target is told to abort."""
        if os.getpid() != self._pid:
            # Before anything is packed: the buckets are the parent's, too.
            raise UsedAfterFork(f"this client belongs to process {self._pid}: connect anew in the child")
        if isinstance(weights, dict):
            # Whatever becomes of it meanwhile, these are the ones.
            weights = dict(weights)
        turn = _Turn(self._in_use)
        try:
            if turn.is_contested:
                yield turn.wait(options.get("deadline_seconds"))
            if only is None and isinstance(weights, dict) and (planned := self._presumed(weights, target)) is not None:
                try:
                    return (yield from self._run_presumed(target, weights, planned, options))
                except _OthersHaveComeError:
                    pass
            return (yield from self._run_announced(target, weights, specs, only, options, manifest))
        finally:
            if turn.is_contested:
                # Where it is waited for: it may have come to a waiting that was just interrupted.
                yield turn.leave()
            else:
                turn.end()

    def _run_announced(
        self,
        target: BucketTarget[_Report],
        weights: Weights,
        specs: Sequence[TensorShape] | None,
        only: list[str] | None,
        options: CommitOptions,
        manifest: AskManifest,
    ) -> Steps[_Report]:
        coming, layout = yield from self._announced(weights, specs, manifest)
        if only is not None:
            check_selection(only, layout)
            layout = {name: layout[name] for name in only}
            coming = _selected(coming, layout)
        begin = partial(target.begin, tensors=[*layout.values()], options=options, partial=only is not None)
        beginning = Beginning(target, begin)
        if isinstance(coming, dict):
            run = self._run_planned(target, coming, layout, beginning)
        else:
            run = self._run_in_order(target, coming, layout, beginning)
        report = yield from ending(run, beginning.end)
        if only is None and not isinstance(weights, Mapping):
            self._learned = layout
        return report

    def _presumed(self, held: dict[str, torch.Tensor], target: BucketTarget[_Report]) -> _Planned | None:
        """What these tensors are packed by if they are like the last ones in all that has not been looked at yet; only
        where that saves time."""
        planned = self._planned
        if planned is None or planned.plan.ahead == 1 or not (target.may_begin_again and self._are_read):
            return None
        is_last = planned.layout is self._held.layout and planned.max_pieces == target.max_pieces
        return planned if is_last and self._held.is_named_alike(held) else None

    def _run_presumed(
        self, target: BucketTarget[_Report], held: dict[str, torch.Tensor], planned: _Planned, options: CommitOptions
    ) -> Steps[_Report]:
        """To look at the shapes of all tensors takes longer than to begin. Raises `_OthersHaveComeError`, and then the
        target has read nothing."""
        begin = partial(target.begin, tensors=[*planned.layout.values()], options=options, partial=False)
        beginning = Beginning(target, begin)
        beginning.buckets = self._buckets
        run = self._send_presumed(target, [*held.values()], planned.plan, beginning)
        return (yield from ending(run, beginning.end))

    def _send_presumed(
        self, target: BucketTarget[_Report], tensors: list[torch.Tensor], plan: PackingPlan, beginning: Beginning
    ) -> Steps[_Report]:
        assert beginning.buckets is not None, "they are as old as the plan"
        packed = _synchronised(self._packed_presumably(plan, tensors), beginning.buckets)
        try:
            # First of all: a GPU that has one to pack does not wait for what the loop's thread has to do to begin.
            first = next(packed)
            yield Started(beginning.start())
            filled = [first, *islice(packed, plan.ahead - 1)]
            # Of those that are filled it is known.
            if not self._held.is_shaped_alike(tensors, slice(plan.parts[len(filled) - 1].stop, None)):
                raise _OthersHaveComeError
        except _OthersHaveComeError:
            yield beginning.take_back()
            raise
        return (yield from self._sent(target, beginning, filled, packed))

    def _packed_presumably(self, plan: PackingPlan, tensors: list[torch.Tensor]) -> Iterator[FilledBucket]:
        """No tensor is read that has another shape than its pieces were made for. Raises `_OthersHaveComeError`."""
        packed = plan.pack(tensors)
        for part in plan.parts[: plan.ahead]:
            if not self._held.is_shaped_alike(tensors, part):
                raise _OthersHaveComeError
            yield next(packed)
        yield from packed

    def _run_planned(
        self,
        target: BucketTarget[_Report],
        held: dict[str, torch.Tensor],
        layout: Layout,
        beginning: Beginning,
    ) -> Steps[_Report]:
        """Where packing is only enqueued, the role and the gate are waited for meanwhile."""
        if not held:
            raise ValueError(NOTHING)
        if not self._are_read:
            # Who has the role knows that of what was given up nothing is under way any more.
            yield beginning.enter()
        beginning.buckets = self._large_enough(layout, next(iter(held.values())).device)
        plan = self._plan_of(held, layout, target.max_pieces)
        if plan.ahead > 1:
            yield Started(beginning.start())
        packed = _synchronised(plan.pack([*held.values()]), beginning.buckets)
        return (yield from self._sent(target, beginning, [*islice(packed, plan.ahead)], packed))

    def _run_in_order(
        self, target: BucketTarget[_Report], tensors: Iterator[NamedTensor], layout: Layout, beginning: Beginning
    ) -> Steps[_Report]:
        """The first bucket is packed before the gate closes: generation waits less, and most mistakes show up by then.
        But nothing is asked of an iterator before the role has come."""
        yield beginning.enter()
        first = next(tensors, None)
        if first is None:
            raise ValueError(NOTHING)
        buckets = beginning.buckets = self._large_enough(layout, first[1].device)
        filling = pack(chain([first], tensors), layout, buckets.views, target.max_pieces, self._places)
        packed = _synchronised(filling, buckets)
        return (yield from self._sent(target, beginning, [*islice(packed, 1)], packed))

    def _sent(
        self,
        target: BucketTarget[_Report],
        beginning: Beginning,
        filled: list[FilledBucket],
        packed: Iterator[FilledBucket],
    ) -> Steps[_Report]:
        """What is filled, and what is still to be packed."""
        assert beginning.buckets is not None, "they are filled"
        self._are_read = False
        awake_seconds = AWAKE_SECONDS.get(beginning.buckets.views[0].device.type, 0.0)
        yield Soon(beginning.go_on(filled), awake_seconds)
        report: _Report = yield from sent(target, packed, awake_seconds)
        self._are_read = True
        return report

    def _plan_of(self, names: Iterable[str], layout: Layout, max_pieces: int) -> PackingPlan:
        planned = self._planned
        # What has not changed since has the very same layout; to compare all tensors takes longer than to pack some.
        if planned is None or planned.layout is not layout or planned.max_pieces != max_pieces:
            shapes = [layout[name] for name in names]
            if planned is not None and planned.plan.is_for(shapes, max_pieces):
                plan = planned.plan
            else:
                plan = PackingPlan(shapes, self._places, max_pieces)
            planned = self._planned = _Planned(layout, max_pieces, plan)
        return planned.plan

    def _announced(
        self, weights: Weights, specs: Sequence[TensorShape] | None, manifest: AskManifest
    ) -> Steps[tuple[Coming, Layout]]:
        """What will come and what is announced of it: `specs`, else what a mapping shows, else what can be foreseen."""
        if isinstance(weights, dict):
            return weights, self._held.of(weights)
        if isinstance(weights, Mapping):
            return iter(weights.items()), layout_of(named_pairs(weights.items()))
        tensors = named_pairs(weights)
        if specs is not None:
            return tensors, announced(specs)
        first = next(tensors, None)
        if first is None:
            return iter(()), {}
        known: Manifest = yield manifest()
        learned = layout_of([first]).items() <= self._learned.items()
        layout = self._learned if learned else predicted_layout(known, *first)
        return without_aliases(chain([first], tensors), known, layout), layout

    def _large_enough(self, layout: Layout, device: torch.device) -> Buckets:
        """The present ones unless they are too small for how much a bucket may hold; the daemon lets go of the old.

        However many there are, together they take the memory of a pair, and no more than all tensors need.
        """
        # Summing up takes longer than the other steps of a later refit.
        if self._buckets is not None and self._planned is not None and self._planned.layout is layout:
            return self._buckets
        count = BUCKETS.get(device.type, BUCKETS["cpu"])
        default_bytes = DEFAULT_BYTES.get(device.type, DEFAULT_BYTES["cpu"])
        half_bytes = default_bytes if self._bucket_bytes is None else self._bucket_bytes
        size_bytes = min(aligned(2 * half_bytes // count, ALIGNMENT_BYTES), share_bytes(layout.values(), count))
        if self._buckets is None or self._buckets.views[0].numel() < size_bytes:
            self.close()
            buckets = backend_for(device.type).buckets(count, size_bytes, device)
            # Together: an interrupt may come at every call.
            self._buckets, self._places = buckets, Places(buckets.views)
        return self._buckets


class _Turn:
    """Of one refit, to fill the buckets; the refits of several threads, or tasks of a loop, take turns."""

    def __init__(self, in_use: threading.Lock) -> None:
        self._in_use = in_use
        self._has_come = in_use.acquire(blocking=False)
        self.is_contested = not self._has_come

    async def wait(self, timeout_seconds: float | None) -> None:
        """Raises `RequestTimedOut`."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self._has_come:
                    await asyncio.sleep(_LOOK_SECONDS)
                    self._has_come = self._in_use.acquire(blocking=False)
        except TimeoutError:
            raise RequestTimedOut(f"another refit has filled the buckets for {timeout_seconds:g} s") from None

    def end(self) -> None:
        """Nothing where it has not come."""
        if self._has_come:
            self._has_come = False
            self._in_use.release()

    async def leave(self) -> None:
        self.end()


def _selected(coming: Coming, names: Container[str]) -> Coming:
    if isinstance(coming, dict):
        return dict(selected(coming.items(), names))
    return selected(coming, names)


def _synchronised(packed: Iterator[FilledBucket], buckets: Buckets) -> Iterator[FilledBucket]:
    """Each as soon as it is packed: what is enqueued behind it is not to be waited for by its reader."""
    for filled in packed:
        buckets.synchronise(filled.bucket)
        yield filled
