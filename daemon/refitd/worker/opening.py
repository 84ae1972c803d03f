"""Opens what a trainer lends: mapped, compared with what the engine expects, and its copies compiled."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from refit_protocol.bell import MAX_BELL_WORKERS
from refit_protocol.errors import ProtocolError
from refit_protocol.tensors import MemfdSegment, Segment, SourceTensor
from refitd.worker.boundary import Answer
from refitd.worker.buckets import BucketSource
from refitd.worker.parts import whole_tensor
from refitd.worker.plan import listed, refuse_loader
from refitd.worker.release import Release
from refitd.worker.sources import InplaceSource, Segments
from refitd.worker.state import WorkerState
from refitd.worker.weights import EngineWeights

if TYPE_CHECKING:
    from refitd.worker.cuda_bell import Bell

logger = logging.getLogger(__name__)

_Opened = tuple[InplaceSource | BucketSource, Answer]


def open_source(
    state: WorkerState,
    source_id: int | str,
    kind: str,
    segments: list[Segment],
    tensors: list[SourceTensor],
    plan: str,
    bell: Bell | None = None,
    release: Release | None = None,
) -> Answer:
    try:
        source, answer = _opened(state.weights, kind, segments, tensors, plan, bell, release)
    except BaseException:
        if bell is not None:
            bell.close()
        raise
    state.open(source_id, source)
    return answer


def _opened(
    weights: EngineWeights,
    kind: str,
    segments: list[Segment],
    tensors: list[SourceTensor],
    plan: str,
    bell: Bell | None,
    release: Release | None,
) -> _Opened:
    if kind == "inplace":
        weights.check_manifest([whole_tensor(tensor) for tensor in tensors])
    # Of what several ranks hold a worker reads its part, and what lies on other devices it may not even reach.
    of_ranks = len({tensor.name for tensor in tensors}) < len(tensors)
    mapped = Segments(segments, weights.device, at_need=of_ranks)
    try:
        if kind == "bucket":
            return _buckets(weights, mapped, plan, release)
        return _in_place(weights, mapped, tensors, plan, bell, release)
    except BaseException:
        mapped.close()
        raise


def _buckets(weights: EngineWeights, mapped: Segments, plan: str, release: Release | None) -> _Opened:
    loader_tensors = listed(weights.plan.loader_only)
    path = "mixed" if loader_tensors else "plan"
    answer = {
        "path": path,
        "planned": len(weights.plan.routes),
        "loader_tensors": loader_tensors,
        "bytes": 0,
        "release": release is not None,
    }
    return BucketSource(mapped, planned=plan != "off", release=release), answer


def open_bell(segment: MemfdSegment | None, worker: int, device: torch.device) -> Bell | None:
    """None where a refit cannot wait for it: it is only slower then."""
    if segment is None or device.type != "cuda" or worker >= MAX_BELL_WORKERS:
        return None
    # CuPy is only there where the engine runs on a GPU.
    from refitd.worker.cuda_bell import Bell

    try:
        return Bell(segment, worker, device)
    except ProtocolError as error:
        logger.warning("prepared refits begin when their end is asked for: %s", error.message)
        return None


def _in_place(
    weights: EngineWeights,
    mapped: Segments,
    tensors: list[SourceTensor],
    plan: str,
    bell: Bell | None,
    release: Release | None,
) -> _Opened:
    source = InplaceSource(mapped, tensors, planned=plan != "off", bell=bell, release=release)
    compiled = source.compiled(weights, None)
    refuse_loader(compiled.loader_tensors, plan)
    return source, {
        "path": compiled.path,
        "planned": len({named.tensor for named in compiled.copies}),
        "loader_tensors": listed(compiled.loader_tensors),
        "bytes": compiled.size_bytes,
        "release": release is not None,
    }
