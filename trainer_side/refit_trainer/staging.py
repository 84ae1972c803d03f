"""Refits through staging buckets: opened once, one packed while the other is being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from refit_protocol.messages import Manifest
from refit_protocol.tensors import TensorShape, aligned
from refit_trainer.backends import Buckets, backend_for
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
from refit_trainer.packing import ALIGNMENT_BYTES, FilledBucket, Places, pack
from refit_trainer.packing_plan import PackingPlan
from refit_trainer.refits import CommitOptions
from refit_trainer.steps import Steps

# A GPU lets two processes take turns: with a third bucket it has work while an answer is on its way.
BUCKETS = {"cpu": 2, "cuda": 3}

# A dict holds its tensors; any other mapping may make them when it is asked for them, like an iterator.
Coming: TypeAlias = dict[str, torch.Tensor] | Iterator[NamedTensor]
Weights: TypeAlias = Mapping[str, torch.Tensor] | Iterable[NamedTensor]
AskManifest: TypeAlias = Callable[[], Coroutine[Any, Any, Manifest]]

_Report = TypeVar("_Report")
_Answer = TypeVar("_Answer", covariant=True)


class BucketTarget(Protocol[_Answer]):
    """Who reads the buckets: one daemon, or several that map the same ones."""

    @property
    def max_pieces(self) -> int:
        """In one bucket; known once entered."""

    async def enter(self) -> None: ...

    async def begin(
        self, buckets: Buckets, tensors: list[TensorShape], options: CommitOptions, *, partial: bool
    ) -> None:
        """Everything announced is validated, and the gate shuts."""

    async def apply(self, filled: FilledBucket) -> None:
        """Returns when the bucket that is packed next has been read."""

    async def finish(self) -> _Answer: ...

    async def abort(self, error: BaseException) -> None:
        """`error` is what ends the refit, and will be raised."""

    async def leave(self) -> None:
        """Nothing where it was not entered, or was left before."""


class Staging:
    """A pair of buckets, how a mapping is packed into them, and the layout that iterators are known to yield."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = aligned(bucket_bytes, ALIGNMENT_BYTES)
        self._buckets: Buckets | None = None
        self._places = Places([])
        self._plan: PackingPlan | None = None
        self._held = MappingLayout()
        self._learned: Layout = {}

    def close(self) -> None:
        if self._buckets is not None:
            self._places, self._plan = Places([]), None
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
        coming, layout = yield from self._announced(weights, specs, manifest)
        if only is not None:
            check_selection(only, layout)
            layout = {name: layout[name] for name in only}
        try:
            # The target may be entered by the time that its caller is interrupted: leaving comes after either.
            yield target.enter()
            try:
                report = yield from self._run(target, coming, layout, options, partial=only is not None)
            except BaseException as error:
                yield target.abort(error)
                raise
        finally:
            yield target.leave()
        if not isinstance(weights, Mapping) and only is None:
            self._learned = layout
        return report

    def _run(
        self,
        target: BucketTarget[_Report],
        coming: Coming,
        layout: Layout,
        options: CommitOptions,
        *,
        partial: bool,
    ) -> Steps[_Report]:
        if partial:
            coming = _selected(coming, layout)
        tensors = iter(coming.items()) if isinstance(coming, dict) else coming
        first = next(tensors, None)
        if first is None:
            raise ValueError("there is not one tensor to refit with: an iterator may have been used up before")
        buckets = self._large_enough(layout, first[1].device)
        plan = self._plan_of(coming, layout, target.max_pieces) if isinstance(coming, dict) else None
        if isinstance(coming, dict) and plan is not None:
            ahead, filling = plan.ahead, plan.pack([*coming.values()])
        else:
            # Also for a mapping that does not bring what was announced of it: what is wrong is said here.
            ahead, filling = 1, pack(chain([first], tensors), layout, buckets.views, target.max_pieces, self._places)
        packed = _synchronised(filling, buckets)
        # The first bucket is packed before the gate closes: generation waits less, and most mistakes show up by then.
        waiting = deque(islice(packed, ahead))
        yield target.begin(buckets, [*layout.values()], options, partial=partial)
        while waiting:
            yield target.apply(waiting.popleft())
            if not waiting:
                waiting.extend(islice(packed, 1))
        report: _Report = yield target.finish()
        return report

    def _plan_of(self, held: dict[str, torch.Tensor], layout: Layout, max_pieces: int) -> PackingPlan | None:
        """None where the tensors are not exactly those of the layout."""
        shapes = [layout.get(name) for name in held]
        if self._plan is None or not self._plan.is_for(shapes, max_pieces):
            known = [shape for shape in shapes if shape is not None]
            if not len(known) == len(shapes) == len(layout):
                return None
            self._plan = PackingPlan(known, self._places, max_pieces)
        return self._plan if self._plan.fits([*held.values()]) else None

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

        However many there are, together they take the memory of a pair.
        """
        count = BUCKETS.get(device.type, 2)
        most_bytes = aligned(2 * self._bucket_bytes // count, ALIGNMENT_BYTES)
        present_bytes = 0 if self._buckets is None else self._buckets.views[0].numel()
        # Summing up takes longer than the other steps of a later refit.
        size_bytes = most_bytes if present_bytes >= most_bytes else min(most_bytes, _needed_bytes(layout))
        if self._buckets is None or present_bytes < size_bytes:
            self.close()
            self._buckets = backend_for(device.type).buckets(count, size_bytes, device)
            self._places = Places(self._buckets.views)
        return self._buckets


def _needed_bytes(layout: Layout) -> int:
    needed_bytes = sum(aligned(shape.size_bytes, ALIGNMENT_BYTES) for shape in layout.values())
    return max(needed_bytes, ALIGNMENT_BYTES)


def _selected(coming: Coming, names: Container[str]) -> Coming:
    if isinstance(coming, dict):
        return dict(selected(coming.items(), names))
    return selected(coming, names)


def _synchronised(packed: Iterator[FilledBucket], buckets: Buckets) -> Iterator[FilledBucket]:
    """Each as soon as it is packed: what is enqueued behind it is not to be waited for by its reader."""
    for filled in packed:
        buckets.synchronise(filled.bucket)
        yield filled
