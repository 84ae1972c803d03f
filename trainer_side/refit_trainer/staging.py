"""Refits through staging buckets: opened once, one packed while the other is being read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch

from refit_protocol.messages import (
    AbortRefit,
    ApplyBucket,
    BeginRefit,
    BucketApplied,
    FinishRefit,
    Manifest,
    RefitAborted,
    RefitBegan,
    RefitCommitted,
    RefitReport,
)
from refit_protocol.tensors import TensorShape, aligned
from refit_trainer.backends import Buckets, backend_for
from refit_trainer.connection import Connection
from refit_trainer.errors import DaemonRestarted, DaemonUnreachable, RefitdError
from refit_trainer.layouts import Layout, NamedTensor, layout_of, predicted_layout, selected, without_aliases
from refit_trainer.packing import ALIGNMENT_BYTES, FilledBucket, pack
from refit_trainer.refits import CommitOptions, RefitOptions, split_options
from refit_trainer.steps import Steps
from refit_trainer.writer import WriterRole

Weights: TypeAlias = Mapping[str, torch.Tensor] | Iterable[NamedTensor]
AskManifest: TypeAlias = Callable[[], Coroutine[Any, Any, Manifest]]

BUCKETS = 2
# A broken connection is soon back; a daemon that is gone for longer has ended our refit by itself.
RECONNECT_SECONDS = 5.0


class Staging:
    """The bucket pair of one session, and the layout that its iterators are known to yield."""

    def __init__(self, connection: Connection, role: WriterRole, bucket_bytes: int) -> None:
        self._connection = connection
        self._role = role
        self._bucket_bytes = aligned(bucket_bytes, ALIGNMENT_BYTES)
        self._buckets: Buckets | None = None
        self._learned: Layout = {}

    def close(self) -> None:
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None

    def refit(
        self, weights: Weights, specs: Sequence[TensorShape] | None, given: RefitOptions, manifest: AskManifest
    ) -> Steps[RefitReport]:
        """Packs, sends and commits. Whatever ends it early, the daemon is told to abort."""
        only, options, timeout_seconds = split_options(given)
        tensors, layout = yield from self._announced(weights, specs, manifest)
        if only is not None:
            layout = {name: layout[name] for name in only if name in layout}
            tensors = selected(tensors, frozenset(only))
        epoch = yield self._role.enter(timeout_seconds)
        refit = _BucketRefit(self._connection, epoch, timeout_seconds)
        try:
            report = yield from self._run(refit, tensors, layout, options, partial=only is not None)
        except BaseException as error:
            self._role.note(error)
            yield refit.abort(error)
            raise
        finally:
            yield self._role.leave()
        if not isinstance(weights, Mapping) and only is None:
            self._learned = layout
        return report

    def _run(
        self,
        refit: _BucketRefit,
        tensors: Iterator[NamedTensor],
        layout: Layout,
        options: CommitOptions,
        *,
        partial: bool,
    ) -> Steps[RefitReport]:
        first = next(tensors, None)
        if first is None:
            raise ValueError("there is not one tensor to refit with")
        buckets = self._large_enough(layout, first[1].device)
        source = yield self._role.source_of(buckets, "bucket", [], timeout_seconds=refit.timeout_seconds)
        limit = self._connection.welcome.limits.bucket_pieces
        packed = pack(chain([first], tensors), layout, buckets.views, limit)
        # The first bucket is packed before the gate closes: generation waits less, and most mistakes show up by then.
        filled = next(packed, None)
        yield refit.begin(
            BeginRefit(epoch=refit.epoch, source=source, tensors=[*layout.values()], partial=partial, **options)
        )
        while filled is not None:
            buckets.synchronise(filled.bucket)
            yield refit.apply(filled)
            filled = next(packed, None)
        report: RefitReport = yield refit.finish()
        return report

    def _announced(
        self, weights: Weights, specs: Sequence[TensorShape] | None, manifest: AskManifest
    ) -> Steps[tuple[Iterator[NamedTensor], Layout]]:
        """What will come and what is announced of it: `specs`, else what a mapping shows, else what can be foreseen."""
        if isinstance(weights, Mapping):
            return iter(weights.items()), layout_of(weights.items())
        tensors = iter(weights)
        if specs is not None:
            return tensors, {spec.name: spec for spec in specs}
        first = next(tensors, None)
        if first is None:
            return iter(()), {}
        known: Manifest = yield manifest()
        learned = layout_of([first]).items() <= self._learned.items()
        layout = self._learned if learned else predicted_layout(known, *first)
        return without_aliases(chain([first], tensors), known, layout), layout

    def _large_enough(self, layout: Layout, device: torch.device) -> Buckets:
        """The present pair unless it is too small for how much a bucket may hold; the daemon lets go of the old one."""
        needed_bytes = sum(aligned(shape.size_bytes, ALIGNMENT_BYTES) for shape in layout.values())
        size_bytes = min(self._bucket_bytes, max(needed_bytes, ALIGNMENT_BYTES))
        if self._buckets is None or self._buckets.views[0].numel() < size_bytes:
            self.close()
            self._buckets = backend_for(device.type).buckets(BUCKETS, size_bytes, device)
        return self._buckets


class _BucketRefit:
    """The commands of one refit, all of them on the event loop."""

    def __init__(self, connection: Connection, epoch: int, timeout_seconds: float) -> None:
        self._connection = connection
        self._reading: dict[int, asyncio.Task[BucketApplied]] = {}
        self._number: int | None = None
        self.epoch = epoch
        self.timeout_seconds = timeout_seconds

    async def begin(self, command: BeginRefit) -> None:
        began = await self._connection.request(command, RefitBegan, timeout_seconds=self.timeout_seconds)
        self._number = began.refit

    async def apply(self, filled: FilledBucket) -> None:
        """Returns when the bucket that is packed next has been read."""
        assert self._number is not None, "begin() comes first"
        command = ApplyBucket(epoch=self.epoch, refit=self._number, bucket=filled.bucket, pieces=filled.pieces)
        self._reading[filled.bucket] = asyncio.create_task(
            self._connection.request(command, BucketApplied, timeout_seconds=self.timeout_seconds)
        )
        following = self._reading.pop((filled.bucket + 1) % BUCKETS, None)
        if following is not None:
            await following

    async def finish(self) -> RefitReport:
        assert self._number is not None, "begin() comes first"
        for applied in list(self._reading.values()):
            await applied
        command = FinishRefit(epoch=self.epoch, refit=self._number)
        committed = await self._connection.request(command, RefitCommitted, timeout_seconds=self.timeout_seconds)
        self._number = None
        return committed.report

    async def abort(self, error: BaseException) -> None:
        """Nothing if the refit was not begun. The daemon's answer does not matter: `error` is being raised.

        But `DaemonRestarted` is told only once, so it is raised instead.
        """
        for applied in self._reading.values():
            applied.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        if self._number is not None:
            patience_seconds = RECONNECT_SECONDS if isinstance(error, DaemonUnreachable) else self.timeout_seconds
            command = AbortRefit(epoch=self.epoch, refit=self._number)
            try:
                await self._connection.request(command, RefitAborted, timeout_seconds=patience_seconds)
            except RefitdError as refusal:
                if isinstance(refusal, DaemonRestarted):
                    raise
