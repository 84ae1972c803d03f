"""The end of a refit, when all of it has been written, and what the daemon is told of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from refitd.worker.attest import Attest, check_finite
from refitd.worker.boundary import Answer, Turns
from refitd.worker.buckets import BucketRefit
from refitd.worker.plan import listed
from refitd.worker.proof import prove_by_reload
from refitd.worker.state import WorkerState


@dataclass
class Clock:
    """Milliseconds of each phase that ran."""

    milliseconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.milliseconds[phase] = (now - self._since) * 1000
        self._since = now


def complete_in_turns(
    state: WorkerState, refit: BucketRefit, attest: Attest, *, finite: bool, done: int | None = None
) -> Turns:
    """What it takes to know the digest goes to the device behind the last bucket's copy, where nothing lies between."""
    # First of all: whatever is refused afterwards knows that something was written.
    while not refit.is_on_its_way:
        yield
        state.require_under_way(refit)
    clock = Clock()
    refit.require_complete()
    clock.lap("validate")
    state.before_write(engine_stands=refit.has_written)
    follows = refit.is_copied_whole and state.weights.proven_plan is state.weights.plan and not finite
    digest = state.begin_digest(attest) if follows else None
    while not refit.has_arrived:
        yield
        state.require_under_way(refit)
    answer = _completed(state, refit, clock, digest or partial(_checked_digest, state, attest, finite))
    refit.source.tell_done(done)
    return answer


def complete(state: WorkerState, refit: BucketRefit, clock: Clock, attest: Attest, *, finite: bool) -> Answer:
    """Of a refit of which everything has been written."""
    return _completed(state, refit, clock, partial(_checked_digest, state, attest, finite))


def _completed(state: WorkerState, refit: BucketRefit, clock: Clock, digest: Callable[[], dict[str, Any]]) -> Answer:
    """What follows from the pieces is renewed, proven and digested."""
    weights = state.weights
    refit.load_staged()
    if weights.proven_plan is not weights.plan:
        prove_by_reload(weights)
    weights.after_write()
    clock.lap("copy")
    digested = digest()
    clock.lap("attest")
    state.forget_refit()
    announced = refit.announced
    return report(refit.size_bytes, len(announced.tensors), announced.path, announced.loader_tensors, clock, digested)


def _checked_digest(state: WorkerState, attest: Attest, finite: bool) -> dict[str, Any]:
    if finite:
        check_finite((name, parameter, parameter.dtype) for name, parameter in state.weights.model.named_parameters())
    return state.attested_digest(attest)


def report(
    size_bytes: int, tensors: int, path: str, loader_tensors: Mapping[str, str], clock: Clock, digest: dict[str, Any]
) -> Answer:
    return {
        "bytes": size_bytes,
        "tensors": tensors,
        "path": path,
        "loader_tensors": listed(loader_tensors),
        "milliseconds": clock.milliseconds,
        **digest,
    }
