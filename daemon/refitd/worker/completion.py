"""The end of a refit, when all of it has been written, and what the daemon is told of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from refitd.worker.attest import Attest, check_finite
from refitd.worker.boundary import Answer
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


def complete(state: WorkerState, refit: BucketRefit, clock: Clock, attest: Attest, *, finite: bool) -> Answer:
    """All pieces have been written: what follows from them is renewed, proven and digested."""
    weights = state.weights
    refit.load_staged()
    if weights.proven_plan is not weights.plan:
        prove_by_reload(weights)
    weights.after_write()
    clock.lap("copy")
    if finite:
        check_finite((name, parameter, parameter.dtype) for name, parameter in weights.model.named_parameters())
    digest = state.attested_digest(attest)
    clock.lap("attest")
    state.forget_refit()
    announced = refit.announced
    return report(refit.size_bytes, len(announced.tensors), announced.path, announced.loader_tensors, clock, digest)


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
