"""A commit in place made ahead of time: validated, and on a GPU with its copies waiting for the trainer's bell."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from refitd.worker.attest import Attest, shares_memory
from refitd.worker.boundary import Answer
from refitd.worker.completion import Clock, report
from refitd.worker.sources import CompiledSource, InplaceSource
from refitd.worker.state import WorkerState
from refitd.worker.weights import EngineWeights

if TYPE_CHECKING:
    from refitd.worker.cuda_bell import WaitingCopies

_Checks = tuple[Callable[[], None], Callable[[], dict[str, Any]]]


class Preparation:
    """Copies that wait, the check and the digest behind them, and the commit that they are for."""

    def __init__(
        self,
        state: WorkerState,
        source: InplaceSource,
        compiled: CompiledSource,
        attest: Attest,
        copies: WaitingCopies[_Checks],
    ) -> None:
        self._state = state
        self._source = source
        self._compiled = compiled
        self._attest = attest
        self._copies = copies

    def is_for(self, source: InplaceSource, only: Collection[str] | None, attest: Attest) -> bool:
        names = source.tensors.keys() if only is None else only
        present = self._compiled.plan is self._state.weights.plan
        return present and source is self._source and attest is self._attest and self._compiled.names == set(names)

    def stand_by(self) -> None:
        self._copies.stand_by()

    def commit(self, release: int | None) -> Answer:
        """What was rung for is under way already; what was not begins here, once the trainer has released it."""
        state = self._state
        state.wrote = True
        try:
            done = self._finish(release)
        except BaseException:
            state.wrote = self.settle()
            raise
        state.wrote = False
        return done

    def _finish(self, release: int | None) -> Answer:
        clock, compiled = Clock(), self._compiled
        self._source.wait_until_written(release)
        clock.lap("validate")
        self._copies.run()
        compiled.program.wait(meanwhile=self._rehearse)
        self._state.weights.after_write()
        clock.lap("copy")
        check, digest = self._copies.behind
        check()
        digested = digest()
        self._copies.tell_arrival()
        self._source.tell_done(release)
        clock.lap("attest")
        return report(compiled.size_bytes, len(compiled.names), compiled.path, compiled.loader_tensors, clock, digested)

    def _rehearse(self) -> None:
        """What runs when the bytes have arrived, and would take several times as long if it had not run for a while."""
        # Again: a late ring for an earlier refit could have taken the number back.
        self._copies.run()
        _, digest = self._copies.rehearsal
        digest()

    def settle(self) -> bool:
        """Whether the copies ran; nothing of them runs any more."""
        return self._copies.settle()


def prepare(
    state: WorkerState, source: InplaceSource, compiled: CompiledSource, attest: Attest, number: int
) -> Preparation | None:
    """Has the copies wait for the bell to be rung for `number`; None where this refit is more than one launch, or has
    no bell."""
    if source.bell is None or not _is_settled(state.weights, source, compiled):
        return None
    # CuPy is only there where the engine runs on a GPU, as everything that has a bell.
    from refitd.worker.cuda_bell import WaitingCopies
    from refitd.worker.cuda_copies import DeviceCopies

    program = compiled.program
    if not isinstance(program, DeviceCopies) or not program.is_one_launch:
        return None

    def enqueue() -> _Checks:
        return compiled.begin_attest(attest), state.begin_digest(attest)

    state.wait_for_others()
    return Preparation(state, source, compiled, attest, WaitingCopies(source.bell, number, program, enqueue))


def _is_settled(weights: EngineWeights, source: InplaceSource, compiled: CompiledSource) -> bool:
    """Whether nothing is left but to copy: the plan is proven, and no value has to be looked at before."""
    ties = [(alias, name) for alias, name in weights.aliases.items() if alias in compiled.names]
    return (
        not compiled.loader_tensors
        and weights.proven_plan is weights.plan
        and (source.proven or not compiled.names >= source.tensors.keys())
        and all(shares_memory(source.view(alias), source.view(name)) for alias, name in ties)
    )
