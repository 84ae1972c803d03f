"""What is said of a refit, by the daemon or as soon as the daemon says it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from refit_protocol.messages import InflightPolicy, RefitMilliseconds, RefitPath, UnplannedTensor
from refit_trainer.errors import UsedAfterFork
from refit_trainer.interruptible import result_of

logger = logging.getLogger(__name__)


@runtime_checkable
class RefitReport(Protocol):
    """What a refit was. Where every worker held the weights before the daemon had said so, whatever is asked of it
    first waits for that, some tenths of a millisecond, and raises what became of the refit."""

    @property
    def version(self) -> int: ...

    @property
    def path(self) -> RefitPath: ...

    @property
    def tensors(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def partial(self) -> bool: ...

    @property
    def policy(self) -> InflightPolicy: ...

    @property
    def unplanned(self) -> list[UnplannedTensor]: ...

    @property
    def digest(self) -> str | None: ...

    @property
    def milliseconds(self) -> RefitMilliseconds: ...

    @property
    def stood_by(self) -> bool: ...


class ComingReport:
    """Of a refit whose answer is on its way."""

    def __init__(self, coming: Future[RefitReport]) -> None:
        self._coming = coming
        self._pid = os.getpid()
        coming.add_done_callback(_warn_of_failure)

    @property
    def version(self) -> int:
        return self._known().version

    @property
    def path(self) -> RefitPath:
        return self._known().path

    @property
    def tensors(self) -> int:
        return self._known().tensors

    @property
    def size_bytes(self) -> int:
        return self._known().size_bytes

    @property
    def partial(self) -> bool:
        return self._known().partial

    @property
    def policy(self) -> InflightPolicy:
        return self._known().policy

    @property
    def unplanned(self) -> list[UnplannedTensor]:
        return self._known().unplanned

    @property
    def digest(self) -> str | None:
        return self._known().digest

    @property
    def milliseconds(self) -> RefitMilliseconds:
        return self._known().milliseconds

    @property
    def stood_by(self) -> bool:
        return self._known().stood_by

    def _known(self) -> RefitReport:
        if self._pid != os.getpid() and not self._coming.done():
            raise UsedAfterFork(f"this report is on its way to process {self._pid}: look at it before you fork")
        return result_of(self._coming)

    def __eq__(self, other: object) -> bool:
        return self._known() == (other._known() if isinstance(other, ComingReport) else other)

    def __hash__(self) -> int:
        return hash(self._known())

    def __repr__(self) -> str:
        return repr(self._known())

    def __reduce__(self) -> tuple[Callable[[RefitReport], RefitReport], tuple[RefitReport]]:
        """A copy, and what goes to another process, is what the daemon says."""
        return _same, (self._known(),)


def known_of(report: RefitReport) -> None:
    """Comes back when the daemon has said it; raises what became of the refit."""
    _ = report.version


def _same(report: RefitReport) -> RefitReport:
    return report


def _warn_of_failure(coming: Future[Any]) -> None:
    """Nobody may ever look at the report; the next call has to do with what is left."""
    if not coming.cancelled() and (error := coming.exception()) is not None:
        logger.error("every worker held the new weights, but they were not published: %s", error)
