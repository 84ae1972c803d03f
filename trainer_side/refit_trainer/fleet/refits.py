"""A refit of several daemons: validated by all, then written by all, then published by all, or by none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import msgspec

from refit_protocol.errors import ErrorCode, Fault
from refit_protocol.messages import RefitReport, RefitValidated
from refit_protocol.tensors import TensorShape
from refit_trainer.backends import Buckets
from refit_trainer.daemon_refit import DaemonRefit
from refit_trainer.errors import DaemonRestarted, FleetRefitFailed, FleetRefitRefused, RefitdError
from refit_trainer.fleet.policy import OnFailure, Phase, Verdict, verdict
from refit_trainer.refits import CommitOptions

if TYPE_CHECKING:
    from refit_trainer.packing import Ahead, FilledBucket
    from refit_trainer.sharing import SharedModule

_Result = TypeVar("_Result")


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """`reports` of the daemons that serve `version` now; `left_out`: those that do not, and why.

    `digest` is what all of them hold, None where they differ (engines of unlike precision) or attest is off.
    """

    version: int
    digest: str | None
    reports: Mapping[str, RefitReport]
    left_out: Mapping[str, RefitdError]


class FleetRefit:
    """One refit, from `enter` to `leave`; to a staging area it is a target like a single daemon.

    With `restore` every daemon writes under hold: the version is published when all of them have written. With
    `leave_out` each commits by itself, in one message where it reads in place.
    """

    def __init__(
        self, refits: Mapping[str, DaemonRefit], left_out: Mapping[str, RefitdError], on_failure: OnFailure
    ) -> None:
        self._in = dict(refits)
        self._entered: dict[str, DaemonRefit] = {}
        self._on_failure = on_failure
        self.left_out = dict(left_out)

    @property
    def taking_part(self) -> list[str]:
        """The endpoints of those that have not failed in it."""
        return [*self._in]

    @property
    def max_pieces(self) -> int:
        return min(refit.max_pieces for refit in self._in.values())

    @property
    def may_begin_again(self) -> bool:
        return False

    async def enter(self) -> None:
        """Takes the writer's role everywhere."""

        async def enter(endpoint: str, refit: DaemonRefit) -> None:
            await refit.enter()
            self._entered[endpoint] = refit

        try:
            await self._step(Phase.VALIDATION, enter)
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        await asyncio.gather(*(refit.leave() for refit in self._entered.values()))

    # --- in place ---

    async def in_place(self, shared: SharedModule, only: list[str] | None, options: CommitOptions) -> FleetReport:
        async def validate(_endpoint: str, refit: DaemonRefit) -> RefitValidated:
            await refit.open(shared.memory, "inplace", shared.tensors)
            return self._restorable(await refit.validate(options, only=only))

        await self._step(Phase.VALIDATION, validate)
        if self._on_failure == "leave_out":
            return self._report(await self._step(Phase.WRITING, lambda _, refit: refit.commit(only, options)))
        await self._step(Phase.WRITING, lambda _, refit: refit.hold(only, options))
        return await self._publish()

    # --- buckets ---

    async def begin(
        self,
        buckets: Buckets,
        tensors: list[TensorShape],
        options: CommitOptions,
        *,
        partial: bool,
        ahead: Ahead,
    ) -> None:
        async def validate(_endpoint: str, refit: DaemonRefit) -> RefitValidated:
            await refit.open(buckets, "bucket", [])
            return self._restorable(await refit.validate(options, tensors=tensors, partial=partial))

        await self._step(Phase.VALIDATION, validate)
        await self._step(Phase.VALIDATION, lambda _, refit: refit.begin(buckets, tensors, options, partial=partial))
        # Not before every daemon has said that it takes them.
        for filled in await ahead():
            await self.apply(filled)

    async def apply(self, filled: FilledBucket) -> None:
        await self._step(Phase.WRITING, lambda _, refit: refit.apply(filled))

    async def finish(self) -> FleetReport:
        if self._on_failure == "leave_out":
            return self._report(await self._step(Phase.WRITING, lambda _, refit: refit.finish()))
        await self._step(Phase.WRITING, lambda _, refit: refit.hold_finished())
        return await self._publish()

    def is_done(self) -> bool:
        """That takes what every daemon answers."""
        return False

    def coming(self, answer: Future[FleetReport]) -> FleetReport:
        return answer.result()

    # --- the end ---

    async def abort(self, error: BaseException) -> None:
        """All that are still in it; nothing where nothing was begun."""
        await asyncio.gather(*(_abort(refit, error) for refit in self._in.values()))
        self._in.clear()

    async def _publish(self) -> FleetReport:
        """The decision: from here on a daemon that fails is one that has to catch up."""
        return self._report(await self._step(Phase.PUBLISHING, lambda _, refit: refit.finish()))

    def _report(self, reports: dict[str, RefitReport]) -> FleetReport:
        digests = {report.digest for report in reports.values()}
        return FleetReport(
            version=next(iter(reports.values())).version,
            digest=digests.pop() if len(digests) == 1 else None,
            reports=reports,
            left_out=self.left_out,
        )

    # --- one step of all ---

    async def _step(self, phase: Phase, step: Callable[[str, DaemonRefit], Awaitable[_Result]]) -> dict[str, _Result]:
        """`step` of every daemon at once; what the failures mean is the policy's table."""
        taking_part = dict(self._in)
        outcomes = await asyncio.gather(
            *(step(endpoint, refit) for endpoint, refit in taking_part.items()), return_exceptions=True
        )
        done: dict[str, _Result] = {}
        failed: dict[str, RefitdError] = {}
        for endpoint, outcome in zip(taking_part, outcomes, strict=True):
            if isinstance(outcome, RefitdError):
                failed[endpoint] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                done[endpoint] = outcome
        if failed:
            await self._judge(phase, failed, len(taking_part))
        return done

    async def _judge(self, phase: Phase, failed: dict[str, RefitdError], members: int) -> None:
        match verdict(phase, failed, members, self._on_failure):
            case Verdict.REFUSE:
                raise FleetRefitRefused("nothing was written at any daemon", {**self.left_out, **failed})
            case Verdict.ABORT:
                await self._abort_each(failed)
                raise FleetRefitFailed("the others serve again what they served before", failed)
            case Verdict.FAIL:
                await self._abort_each(failed)
                raise FleetRefitFailed("no daemon took the new weights", failed)
            case Verdict.LEAVE_OUT:
                for endpoint, error in failed.items():
                    self.left_out[endpoint] = error
                    await _abort(self._in.pop(endpoint), error)

    async def _abort_each(self, failed: Mapping[str, RefitdError]) -> None:
        """The failed ones for their own reason, the others for the first."""
        first = next(iter(failed.values()))
        await asyncio.gather(*(_abort(refit, failed.get(name, first)) for name, refit in self._in.items()))
        self._in.clear()

    def _restorable(self, validated: RefitValidated) -> RefitValidated:
        if self._on_failure == "restore" and validated.restorable_version is None:
            raise RefitdError(
                'it keeps no weights to go back to: set refit.keep_last = "host" there, or on_failure="leave_out" here',
                code=ErrorCode.NOTHING_TO_RESTORE,
                fault=Fault.CLIENT,
            )
        return validated


async def _abort(refit: DaemonRefit, error: BaseException) -> None:
    # The fleet sees a restart by the version that is served afterwards.
    with contextlib.suppress(DaemonRestarted):
        await refit.abort(error)
