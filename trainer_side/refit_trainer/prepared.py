"""Refits that were prepared: everything but the copy was done before the weights were final."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import RefitPrepared
from refit_trainer.daemon_refit import AWAKE_SECONDS, DaemonRefit
from refit_trainer.errors import ClientClosed, NotShareable, RefitdError
from refit_trainer.interruptible import result_of
from refit_trainer.refits import CommitOptions, PrepareOptions, RefitOptions
from refit_trainer.report import ComingReport, RefitReport, known_of
from refit_trainer.steps import Steps, walk, walk_blocking

if TYPE_CHECKING:
    import torch

    from refit_protocol.tensors import TensorShape
    from refit_trainer.backends import Bell
    from refit_trainer.client import LoopThread
    from refit_trainer.sharing import SharedModule
    from refit_trainer.staging import Weights


_Prepared = TypeVar("_Prepared", "PreparedRefit", "AsyncPreparedRefit")

# How one ends.
REFITTED, ABORTED, LEFT = "by refit()", "by abort()", "when its block was left"


@dataclass(frozen=True)
class Terms:
    """What was prepared, and as the caller said it."""

    module: torch.nn.Module
    options: PrepareOptions

    def cover(
        self, weights: torch.nn.Module | Weights, specs: Sequence[TensorShape] | None, options: RefitOptions
    ) -> bool:
        """Whether a `refit` of these is the one prepared: what it leaves out is as it was prepared."""
        return self.difference(weights, specs, options) is None

    def difference(
        self, weights: torch.nn.Module | Weights, specs: Sequence[TensorShape] | None, options: RefitOptions
    ) -> str | None:
        """In what a `refit` of these is another one, in the caller's words; None where it is not."""
        if weights is not self.module:
            return "it is of another module"
        if specs is not None:
            return "it has specs"
        for name, value in options.items():
            if value is not None and value != (prepared := self.options.get(name)):
                return f"{name} is {value!r}, and {'was not named' if prepared is None else f'was {prepared!r}'} there"
        return None


class Preparation:
    """What both clients have of one: its two ends, step-wise. `again` is the same refit without any preparation."""

    def __init__(
        self,
        refit: DaemonRefit,
        shared: SharedModule,
        prepared: RefitPrepared,
        bell: Bell | None,
        again: Callable[[], Steps[RefitReport]],
    ) -> None:
        self._refit = refit
        self._shared = shared
        # That of the source as it is now: a daemon that starts again counts its sources anew.
        self._bell = bell
        self._ended: str | None = None
        self._rung: Bell | None = None
        self._publishing: asyncio.Task[object] | None = None
        self.prepared = prepared
        self.again = again

    def ring(self) -> None:
        """On the thread that has enqueued the writes; `publish` or `give_up` comes next. Before anything else: what
        follows has the time of the copy. Raises `NotShareable`."""
        if self.prepared.ring is not None and self._bell is not None:
            self._bell.ring(self.prepared.ring, self.prepared.workers)
            self._rung = self._bell
        self._shared.memory.synchronise()
        self._require_unmoved()

    def _require_unmoved(self) -> None:
        if (part := self._shared.changed_part()) is not None:
            raise NotShareable(
                f"{part} was replaced or moved after prepare_refit(): only change parameters in place between the two, "
                "and call share_parameters() again before the next refit, which has to be a full one"
            )

    def watch(self, publishing: Future[RefitReport]) -> None:
        """Returns when every worker says by the bell that it holds the new weights, or the daemon has said what became
        of them, or both have taken much longer than a copy takes."""
        bell, ring = self._rung, self.prepared.ring
        if bell is None or ring is None:
            return
        bell.await_ringing()
        until = time.monotonic() + AWAKE_SECONDS["cuda"]
        while not (bell.arrived(ring, self.prepared.workers) or publishing.done()) and time.monotonic() < until:
            # Awake, and yet no hindrance to the client's own thread.
            time.sleep(0)

    @property
    def has_arrived(self) -> bool:
        bell, ring = self._rung, self.prepared.ring
        return bell is not None and ring is not None and bell.arrived(ring, self.prepared.workers)

    async def publish(self) -> RefitReport:
        self._publishing = asyncio.current_task()
        try:
            return await self._refit.publish_prepared()
        except BaseException as error:
            await self._refit.end(error)
            raise

    async def published(self) -> None:
        """Comes back when `publish` has ended, however, and the daemon reads nothing of ours any more."""
        if self._publishing is not None:
            await asyncio.wait([self._publishing])

    def warn_if_forgotten(self) -> None:
        """For a block that nothing has ended early: what it served all the time are the old weights."""
        if not self._ended:
            message = "a prepared refit was left without refit(): nothing has changed; call abort() where that is meant"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    @property
    def has_ended(self) -> bool:
        """By `refit`, however that came out, or without."""
        return self._ended is not None

    async def withdraw(self, how: str) -> None:
        """Nothing where it is over, or is being published; what was interrupted on the way there is not."""
        self._ended = self._ended or how
        if self._publishing is None:
            await self._refit.withdraw()

    async def give_up(self, error: BaseException) -> None:
        """Instead of `publish`."""
        await self._refit.end(error)

    def end(self, how: str) -> None:
        """Once: before `ring`, or a withdrawal."""
        if self._ended:
            raise RefitdError(f"this refit has ended {self._ended}: prepare another one")
        self._ended = how


def prepare_steps(
    refit: DaemonRefit,
    shared: SharedModule,
    only: list[str] | None,
    options: CommitOptions,
    hold_seconds: float | None,
    again: Callable[[], Steps[RefitReport]],
) -> Steps[Preparation]:
    try:
        prepared: RefitPrepared = yield refit.prepare(shared, only, options, hold_seconds)
        if (bell := refit.bell) is not None:
            bell.make_ready()
    except BaseException as error:
        yield refit.end(error)
        raise
    return Preparation(refit, shared, prepared, bell, again)


def is_too_late(error: BaseException) -> bool:
    """The daemon did not wait so long, and nothing has changed."""
    return isinstance(error, RefitdError) and error.code is ErrorCode.UNKNOWN_REFIT


class PreparedRefit:
    """Of a `Daemon`; to be used with `with`: what has not been refitted in the end is withdrawn, and what has been is
    published."""

    def __init__(
        self, preparation: Preparation, thread: LoopThread, terms: Terms, unfinished: set[PreparedRefit]
    ) -> None:
        self._preparation = preparation
        self._thread = thread
        self.terms = terms
        self._unfinished = unfinished
        self._publishing: Future[RefitReport] | None = None
        self._refitted = False
        _replace(unfinished, self)

    @property
    def version(self) -> int:
        """What the refit will publish, unless it comes too late."""
        return self._preparation.prepared.version

    def refit(self) -> None:
        """The parameters as they are now, or will be once all that this thread has enqueued on its stream is done.

        Returns when every worker holds them: they may change at once, and whatever this client asks for from here on
        comes behind them. Where the daemon has not waited so long it is an ordinary refit.
        """
        self._unfinished.discard(self)
        self._preparation.end(REFITTED)
        try:
            self._preparation.ring()
            self._publishing = self._thread.submit_first(self._preparation.publish())
        except BaseException as error:
            self._thread.call(self._preparation.give_up(error))
            raise
        try:
            self._preparation.watch(self._publishing)
            if not self._preparation.has_arrived:
                result_of(self._publishing)
        except BaseException as error:
            # What was interrupted goes on behind nobody's back.
            self._publishing.cancel()
            self._thread.call(self._preparation.published())
            if not is_too_late(error):
                raise
            self._publishing = _known(walk_blocking(self._preparation.again(), self._thread))
        self._refitted = True

    def report(self) -> RefitReport:
        """What the daemon says of the refit, once the version is published."""
        return result_of(self._published)

    def coming_report(self) -> RefitReport:
        """The same at once: what is asked of it waits."""
        return self._published.result() if self._published.done() else ComingReport(self._published)

    @property
    def _published(self) -> Future[RefitReport]:
        if self._publishing is None:
            raise RefitdError("refit() comes first")
        return self._publishing

    def abort(self) -> None:
        """Opens the gate again, nothing has changed; does nothing after `refit()`."""
        if not self._preparation.has_ended:
            self._withdraw(ABORTED)

    def _withdraw(self, how: str) -> None:
        self._unfinished.discard(self)
        if self._publishing is None:
            # With a session that was closed, as by a signal's handler, the daemon has ended it.
            with suppress(ClientClosed):
                self._thread.call(self._preparation.withdraw(how))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                self._preparation.warn_if_forgotten()
            self._withdraw(LEFT)
        except BaseException:
            # An interrupt may come before it is handed in; the second time there may be nothing to do.
            self._withdraw(LEFT)
            raise
        # What `refit` has raised the caller knows.
        if self._refitted and error_type is None:
            known_of(self.report())


class AsyncPreparedRefit:
    """`PreparedRefit` of an `AsyncDaemon`, with `async with`."""

    def __init__(self, preparation: Preparation, terms: Terms, unfinished: set[AsyncPreparedRefit]) -> None:
        self._preparation = preparation
        self.terms = terms
        self._unfinished = unfinished
        self._report: RefitReport | None = None
        _replace(unfinished, self)

    @property
    def version(self) -> int:
        """What the refit will publish, unless it comes too late."""
        return self._preparation.prepared.version

    async def refit(self) -> None:
        """See `PreparedRefit.refit`; this one comes back when the version is published."""
        self._unfinished.discard(self)
        self._preparation.end(REFITTED)
        try:
            self._preparation.ring()
        except BaseException as error:
            await self._preparation.give_up(error)
            raise
        try:
            self._report = await self._preparation.publish()
        except RefitdError as error:
            if not is_too_late(error):
                raise
            self._report = await walk(self._preparation.again())

    def report(self) -> RefitReport:
        """What the daemon says of the refit."""
        if self._report is None:
            raise RefitdError("refit() comes first, and has to end: there is no report of one that was cancelled")
        return self._report

    async def abort(self) -> None:
        """Opens the gate again, nothing has changed; does nothing after `refit()`."""
        await self._withdraw(ABORTED)

    async def _withdraw(self, how: str) -> None:
        self._unfinished.discard(self)
        await self._preparation.withdraw(how)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                self._preparation.warn_if_forgotten()
        finally:
            # Also where warnings are errors.
            await self._withdraw(LEFT)


def _replace(unfinished: set[_Prepared], prepared: _Prepared) -> None:
    """The daemon has one at a time: what was prepared before, and never ended here, it has ended by itself."""
    unfinished.clear()
    unfinished.add(prepared)


def take(
    unfinished: set[_Prepared],
    weights: torch.nn.Module | Weights,
    specs: Sequence[TensorShape] | None,
    options: RefitOptions,
) -> _Prepared | None:
    """What a `refit` of these is to end, for one of the threads that ask for it."""
    for prepared in tuple(unfinished):
        if prepared.terms.cover(weights, specs, options):
            try:
                unfinished.remove(prepared)
            except KeyError:
                continue
            return prepared
    return None


@contextmanager
def refused_beside(
    unfinished: set[_Prepared],
    weights: torch.nn.Module | Weights,
    specs: Sequence[TensorShape] | None,
    options: RefitOptions,
) -> Iterator[None]:
    """Where the daemon refuses a refit since this client has prepared another one, it is said why this is another."""
    try:
        yield
    except RefitdError as error:
        if error.code is ErrorCode.REFIT_IN_PROGRESS:
            for prepared in tuple(unfinished):
                if (difference := prepared.terms.difference(weights, specs, options)) is not None:
                    error.message += f"; this is not the one that was prepared: {difference}"
        raise


def _known(report: RefitReport) -> Future[RefitReport]:
    future: Future[RefitReport] = Future()
    future.set_result(report)
    return future
