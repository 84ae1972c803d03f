"""What a worker keeps between the daemon's calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from refit_protocol.digest import DigestMode, combine_parts
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.rendezvous import collective_failed
from refitd.worker.attest import Attest
from refitd.worker.buckets import BucketRefit, BucketSource
from refitd.worker.collective import CollectiveSource, Joining, Reception
from refitd.worker.digest import DigestReader
from refitd.worker.group_end import GroupEnd
from refitd.worker.keep import Keeper
from refitd.worker.sources import InplaceSource
from refitd.worker.weights import EngineWeights

KEEP_TIMEOUT_SECONDS = 60.0
# How long the end of broadcasts that were broken off is waited for.
END_SECONDS = 10.0


class Prepared(Protocol):
    """A commit in place that is ready but for its copies; see `preparation`."""

    def is_for(self, source: InplaceSource, only: Collection[str] | None, attest: Attest) -> bool: ...

    def stand_by(self) -> None:
        """Its trainer may ring for it without another word."""

    def commit(self, release: int | None) -> dict[str, Any]:
        """What was rung for is under way already; what was not begins here, once the trainer has released it."""

    def settle(self) -> bool:
        """Whether the copies ran; nothing of them runs any more."""


class WorkerState:
    """What is open, joined, under way and kept. `wrote`: a refit that has not finished may have changed the engine."""

    def __init__(self, weights: EngineWeights) -> None:
        self.weights = weights
        self.sources: dict[int | str, InplaceSource | BucketSource] = {}
        self.joining: dict[int | str, Joining] = {}
        self.refit: BucketRefit | None = None
        self.preparation: Prepared | None = None
        self.keeper = Keeper()
        self.wrote = False
        self._endings: list[GroupEnd] = []
        self._digests = DigestReader(weights)

    def rehearse(self, source_id: int | str) -> None:
        """Looks where a refit from this source has to look, and waits for nothing."""
        self.weights.refresh()
        if isinstance(source := self.sources.get(source_id), InplaceSource):
            source.is_written()

    def before_write(self, *, engine_stands: bool = False) -> None:
        """Whoever still reads the weights as they are, or writes them, is waited for. `engine_stands`: its last step
        was waited for, and the gate has been shut since."""
        self.wait_for_others(engine_stands=engine_stands)
        self.wrote = True

    def forget_refit(self) -> None:
        """As if none had been begun."""
        self.wrote, self.refit = False, None

    def take_preparation(self, source: InplaceSource, only: Collection[str] | None, attest: Attest) -> Prepared | None:
        """The one under way, if it is for this very refit."""
        found = self.preparation
        if found is None or not found.is_for(source, only, attest):
            return None
        self.preparation = None
        return found

    def settle(self) -> None:
        """Ends what was prepared. Nothing waits on the device any more, where it could keep others waiting."""
        if self.preparation is not None:
            ended, self.preparation = self.preparation, None
            # For as long as it is not known.
            wrote, self.wrote = self.wrote, True
            self.wrote = ended.settle() or wrote

    def give_way(self) -> bool:
        """Ends what stands by, unless its trainer has rung for it: whether it has. All of it is copied then, and its
        commit will find it so."""
        ready = self.preparation
        if ready is None:
            return False
        # For as long as it is not known.
        self.wrote = True
        self.wrote = ready.settle()
        if not self.wrote:
            self.preparation = None
        return self.wrote

    def wait_for_others(self, *, engine_stands: bool = False) -> None:
        """Raises `collective_failed` where the broadcasts of a refit that failed may still arrive."""
        self._endings = [end for end in self._endings if not end.wait(END_SECONDS)]
        if self._endings:
            raise collective_failed("broadcasts of an earlier refit could not be ended, and may still be written")
        self.keeper.wait(KEEP_TIMEOUT_SECONDS)
        if self.weights.device.type == "cuda" and not engine_stands:
            # The last step of the engine, on whichever of its streams.
            torch.cuda.synchronize(self.weights.device)

    def inplace(self, source_id: int | str) -> InplaceSource:
        source = self.sources.get(source_id)
        if not isinstance(source, InplaceSource):
            raise ProtocolError(ErrorCode.UNKNOWN_SOURCE, f"there is no open in-place source {source_id}")
        return source

    def buckets(self, source_id: int | str) -> BucketSource:
        source = self.sources.get(source_id)
        if not isinstance(source, BucketSource):
            raise ProtocolError(ErrorCode.UNKNOWN_SOURCE, f"there is no open bucket source {source_id}")
        return source

    def refit_under_way(self) -> BucketRefit:
        if self.refit is None:
            raise ProtocolError(ErrorCode.UNKNOWN_REFIT, "no bucket refit is under way")
        return self.refit

    def require_under_way(self, refit: BucketRefit) -> None:
        """Raises `unknown_refit` where it has been ended meanwhile."""
        if self.refit is not refit:
            raise ProtocolError(ErrorCode.UNKNOWN_REFIT, "the refit was ended by a bucket before this one")

    def joined(self, source_id: int | str, *, planned: bool) -> CollectiveSource | None:
        """The source, once its group is complete. Raises what joining it failed with."""
        before = self.sources.get(source_id)
        if isinstance(before, CollectiveSource):
            return before
        joining = self.joining.get(source_id)
        if joining is None:
            raise ProtocolError(ErrorCode.UNKNOWN_SOURCE, f"nobody is joining a group for source {source_id}")
        group = joining.group()
        if group is None:
            return None
        source = CollectiveSource(group, self.weights.device, planned)
        del self.joining[source_id]
        self.sources[source_id] = source
        return source

    def reception(self) -> Reception:
        """Of the refit under way; its first broadcast is awaited from now on, if it was not yet."""
        refit = self.refit_under_way()
        source = refit.source
        assert isinstance(source, CollectiveSource), "the daemon knows the kinds of its sources"
        if source.reception is None or source.reception.refit is not refit:
            self.wait_for_others()
            return source.begin(self.weights, refit)
        return source.reception

    def open(self, source_id: int | str, source: InplaceSource | BucketSource) -> None:
        """In the place of the one that had this id before."""
        self.close(source_id)
        self.sources[source_id] = source

    def close_all(self) -> None:
        for source_id in [*self.sources, *self.joining]:
            self.close(source_id)

    def close(self, source_id: int | str) -> bool:
        joining = self.joining.pop(source_id, None)
        if joining is not None:
            joining.close()
        source = self.sources.pop(source_id, None)
        if source is None:
            return False
        if self.refit is not None and self.refit.source is source:
            self.refit = None
        source.close()
        if isinstance(source, CollectiveSource) and source.ending is not None:
            self._endings += [] if source.ending.wait(END_SECONDS) else [source.ending]
        return True

    def digest(self, mode: DigestMode) -> dict[str, Any]:
        return _combined(self._reader().parts(mode))

    def begin_digest(self, how: Attest) -> Callable[[], dict[str, Any]]:
        """Enqueues the reads of `attested_digest`."""
        if how is Attest.OFF:
            return lambda: {"digest": None, "digest_parts": {}}
        parts = self._reader().begin(DigestMode(how.value))
        return lambda: _combined(parts())

    def attested_digest(self, how: Attest) -> dict[str, Any]:
        return self.begin_digest(how)()

    def _reader(self) -> DigestReader:
        if self._digests.plan is not self.weights.plan:
            self._digests = DigestReader(self.weights)
        return self._digests


def _combined(parts: dict[str, str]) -> dict[str, Any]:
    return {"digest": combine_parts([parts]), "digest_parts": parts}
