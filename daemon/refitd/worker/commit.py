"""Commits an in-place source: validate, check, copy, attest. All but the copy may have been prepared."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from refitd.worker.attest import Attest, check_finite, check_same
from refitd.worker.boundary import Answer
from refitd.worker.completion import Clock, report
from refitd.worker.proof import load_and_prove, prove_by_reload
from refitd.worker.sources import CompiledSource, InplaceSource
from refitd.worker.state import WorkerState
from refitd.worker.weights import EngineWeights, torch_dtype


def commit(
    state: WorkerState,
    source: InplaceSource,
    only: Collection[str] | None,
    attest: Attest,
    *,
    finite: bool,
    release: int | None = None,
) -> Answer:
    """All of it; see `refitd_commit`."""
    if not finite and (prepared := state.take_preparation(source, only, attest)) is not None:
        return prepared.commit(release)
    state.settle()
    clock, weights = Clock(), state.weights
    source.wait_until_written(release)
    clock.lap("wait")
    compiled = validate(weights, source, only)
    if finite:
        require_finite(weights, source, compiled)
    clock.lap("validate")
    state.before_write()
    compiled = write(weights, source, compiled)
    digest = _attested(state, compiled, attest, clock)
    source.tell_done(release)
    state.wrote = False
    return report(compiled.size_bytes, len(compiled.names), compiled.path, compiled.loader_tensors, clock, digest)


def validate(weights: EngineWeights, source: InplaceSource, only: Collection[str] | None) -> CompiledSource:
    """Whatever can be wrong before the first byte is written, except for the values of the weights."""
    compiled = select(weights, source, only)
    for alias, name in weights.aliases.items():
        if alias in compiled.names:
            check_same(alias, source.view(alias), name, source.view(name))
    return compiled


def select(weights: EngineWeights, source: InplaceSource, only: Collection[str] | None) -> CompiledSource:
    """Whatever can be wrong without a look at any value."""
    if only is not None:
        weights.check_selection(only, available=source.tensors.keys())
    return source.compiled(weights, only)


def require_finite(weights: EngineWeights, source: InplaceSource, compiled: CompiledSource) -> None:
    """Raises `not_finite`; reads every element."""
    names = [name for name in compiled.names if name not in weights.plan.unused]
    check_finite(
        (name, view, torch_dtype(weights.expected[name].dtype)) for name in names for view in source.part_views(name)
    )


def write(weights: EngineWeights, source: InplaceSource, compiled: CompiledSource) -> CompiledSource:
    """One pass over the bytes, which have arrived when `program.wait()` returns; returns what was done.

    The first time, vLLM's own loader writes the weights and the plan has to agree with it; where tensors lie in parts,
    of which no worker needs all, the loader comes second.
    """
    complete = compiled.names >= source.tensors.keys()
    if complete and not source.proven and not source.sharded:
        load_and_prove(weights, source, compiled)
        compiled = source.compiled(weights, None)
    else:
        compiled.program.start()
        if compiled.loader_tensors:
            weights.load((name, source.view(name)) for name in compiled.loader_tensors)
        if weights.proven_plan is not weights.plan:
            prove_by_reload(weights)
    weights.after_write()
    return compiled


def _attested(state: WorkerState, compiled: CompiledSource, attest: Attest, clock: Clock) -> dict[str, Any]:
    """The digest of what is served, once the bytes have arrived and were found to be the source's."""
    # What can be enqueued behind the copy does not have to wait for it.
    try:
        check = compiled.begin_attest(attest)
        digest = state.begin_digest(attest)
    finally:
        compiled.program.wait()
    clock.lap("copy")
    check()
    digested = digest()
    clock.lap("attest")
    return digested
