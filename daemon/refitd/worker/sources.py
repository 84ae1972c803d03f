"""In-place sources: a trainer's own parameters, mapped once and copied from at every commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import CudaIpcSegment, DType, Segment, SourceTensor, TensorShape
from refitd.worker.attest import Attest, FullComparison, NamedCopy, SampledComparison
from refitd.worker.boxes import Transfer, clip_to_region, follow_strides, split_like
from refitd.worker.copies import Copy
from refitd.worker.digest import samples
from refitd.worker.memory import Mapping as MemoryMapping
from refitd.worker.memory import Written, device_uuid, open_segment
from refitd.worker.parts import chosen_parts, whole_tensor
from refitd.worker.plan import Plan, Route
from refitd.worker.programs import Program, copy_program
from refitd.worker.release import Release
from refitd.worker.weights import EngineWeights, torch_dtype

if TYPE_CHECKING:
    from refitd.worker.cuda_bell import Bell

MAX_SELECTIONS = 32
PLAN_OFF = "the plan is switched off"


class Segments:
    """The memory of one source, mapped and seen in any dtype. With `at_need` what is not read is not mapped either."""

    def __init__(self, segments: Sequence[Segment], device: torch.device, *, at_need: bool = False) -> None:
        self._segments = segments
        self._device = device
        self._mappings: dict[int, MemoryMapping] = {}
        self._typed: dict[tuple[int, DType], torch.Tensor] = {}
        try:
            for segment in range(0 if at_need else len(segments)):
                self._mapping(segment)
        except BaseException:
            self.close()
            raise

    @classmethod
    def around(cls, mappings: Sequence[MemoryMapping]) -> Self:
        """Of memory that is there already."""
        segments = cls((), torch.device("cpu"))
        segments._mappings.update(enumerate(mappings))
        return segments

    def is_near(self, segment: int) -> bool:
        """Whether the memory lies on this worker's own device."""
        found = self._segments[segment]
        return not isinstance(found, CudaIpcSegment) or found.device_uuid == device_uuid(self._device)

    def typed(self, segment: int, dtype: DType) -> torch.Tensor:
        """All whole elements of the segment, one-dimensional; the same object every time."""
        key = segment, dtype
        if key not in self._typed:
            data = self._mapping(segment).data
            item_bytes = torch_dtype(dtype).itemsize
            self._typed[key] = data[: data.shape[0] // item_bytes * item_bytes].view(torch_dtype(dtype))
        return self._typed[key]

    def wait_until_written(self) -> None:
        """Until the trainer's writes so far can be read; raises `memory_unavailable` if they never end."""
        for written in self._written():
            written.wait()

    def is_written(self) -> bool:
        """Whether that would return at once."""
        return all(written.is_done() for written in self._written())

    def turns_until_written(self, segment: int) -> Iterator[None]:
        """The same for one segment, in turns: yields as long as it cannot be read."""
        written = self._mapping(segment).written
        if written is not None:
            yield from written.turns()

    def close(self) -> None:
        self._typed.clear()
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()

    def _written(self) -> list[Written]:
        """Each once: several allocations may share an event."""
        events = {id(mapping.written): mapping.written for mapping in self._mappings.values()}
        return [written for written in events.values() if written is not None]

    def _mapping(self, segment: int) -> MemoryMapping:
        if segment not in self._mappings:
            self._mappings[segment] = open_segment(self._segments[segment], self._device)
        return self._mappings[segment]


@dataclass(frozen=True)
class CompiledSource:
    """What one commit of these tensors does: copies of the plan, and tensors for vLLM's loader with the reason."""

    plan: Plan
    names: frozenset[str]
    copies: tuple[NamedCopy, ...]
    program: Program
    comparison: SampledComparison
    full_comparison: FullComparison
    loader_tensors: Mapping[str, str]
    size_bytes: int

    @property
    def path(self) -> str:
        if not self.loader_tensors:
            return "plan"
        return "mixed" if self.copies else "loader"

    def begin_attest(self, how: Attest) -> Callable[[], None]:
        """Enqueues the comparison; what is returned raises `attest_failed` if the engine does not hold what the source
        holds."""
        match how:
            case Attest.OFF:
                return _nothing_to_check
            case Attest.SAMPLED:
                return self.comparison.begin()
            case Attest.FULL:
                return self.full_comparison.check


class InplaceSource:
    """Its tensors lie in mapped memory, whole or in parts; offsets, strides and dtypes are the trainer's. `bell` is
    what starts copies from it that were prepared, where it has one, and `release` what lets commits go on."""

    def __init__(
        self,
        segments: Segments,
        tensors: Sequence[SourceTensor],
        planned: bool,
        bell: Bell | None = None,
        release: Release | None = None,
    ) -> None:
        self.bell = bell
        self._release = release
        self._segments = segments
        self._planned = planned
        self._compiled: dict[frozenset[str] | None, CompiledSource] = {}
        self._parts = chosen_parts(tensors, segments.is_near)
        self.tensors: dict[str, TensorShape] = {name: whole_tensor(parts[0]) for name, parts in self._parts.items()}
        self.sharded = any(part.shard is not None for part in tensors)
        self.proven = False

    def compiled(self, weights: EngineWeights, only: Collection[str] | None) -> CompiledSource:
        """Of the tensors named, or all; made once per selection and plan."""
        key = None if only is None else frozenset(only)
        found = self._compiled.get(key)
        if found is None or found.plan is not weights.plan:
            self._make_room(weights.plan)
            found = self._compiled[key] = self._compile(weights, self.tensors.keys() if only is None else only)
        return found

    def view(self, name: str) -> torch.Tensor:
        """The tensor in its own shape and strides, in trainer memory; a copy of it where it lies in parts."""
        parts = self._parts[name]
        if parts[0].shard is None:
            return self._view(parts[0])
        whole = self._view(parts[0]).new_empty(parts[0].whole_shape)
        for part in parts:
            region = zip(part.shard.offsets, part.shape, strict=True) if part.shard else ()
            whole[tuple(slice(offset, offset + size) for offset, size in region)].copy_(self._view(part))
        return whole

    def part_views(self, name: str) -> list[torch.Tensor]:
        """What makes up the tensor, in trainer memory."""
        return [self._view(part) for part in self._parts[name]]

    def wait_until_written(self, release: int | None = None) -> None:
        """And, if the commit has a number, until it is released. Raises `unsupported` where that cannot be."""
        if release is not None:
            if self._release is None:
                raise ProtocolError(ErrorCode.UNSUPPORTED, "no bell of this source can release a commit")
            self._release.wait(release)
        self._segments.wait_until_written()

    def is_written(self) -> bool:
        return self._segments.is_written()

    def tell_done(self, release: int | None) -> None:
        """That of a commit which has been released, once nothing of it is left to do."""
        if release is not None and self._release is not None:
            self._release.tell_done(release)

    def close(self) -> None:
        self._compiled.clear()
        self._segments.close()
        if self.bell is not None:
            self.bell.close()

    def _view(self, part: SourceTensor) -> torch.Tensor:
        return self._flat(part).as_strided(part.shape, part.resolved_strides, _first_element(part))

    def _flat(self, part: SourceTensor) -> torch.Tensor:
        """All of the segment that holds the part, in its dtype."""
        return self._segments.typed(part.segment, part.dtype)

    def _make_room(self, plan: Plan) -> None:
        current = {key: found for key, found in self._compiled.items() if found.plan is plan}
        self._compiled = current if len(current) < MAX_SELECTIONS else {}

    def _compile(self, weights: EngineWeights, names: Collection[str]) -> CompiledSource:
        plan = weights.plan
        loader_tensors = {name: plan.loader_only[name] for name in names if name in plan.loader_only}
        if not self._planned:
            loader_tensors = {name: PLAN_OFF for name in names if name in plan.routes or name in plan.loader_only}
        plan.check_whole_modules(loader_tensors, names)
        planned = [route for name in names if name not in loader_tensors for route in plan.routes.get(name, ())]
        by_route = dict(copy for route in planned for copy in self._named_copies(weights, route))
        copies = tuple(by_route.values())
        program = copy_program([named.copy for named in copies])
        for name in loader_tensors:
            # Whatever cannot be mapped has to be found out before the first write.
            self.part_views(name)
        return CompiledSource(
            plan=plan,
            names=frozenset(names),
            copies=copies,
            program=program,
            comparison=SampledComparison([(by_route[s.route], s.ordinals) for s in samples(weights, by_route)]),
            full_comparison=FullComparison(copies),
            loader_tensors=loader_tensors,
            size_bytes=program.size_bytes + sum(self.tensors[name].size_bytes for name in loader_tensors),
        )

    def _named_copies(self, weights: EngineWeights, route: Route) -> Iterator[tuple[Route, NamedCopy]]:
        """The route, taken apart where its tensor lies in parts, and what copies each piece of it."""
        for part in self._parts[route.tensor]:
            for piece in _clipped(route.transfer, part):
                copy = Copy(self._flat(part), weights.flat(route.parameter), _in_memory(piece, part))
                yield Route(route.tensor, route.parameter, piece.merged()), NamedCopy(route.tensor, copy)


def _nothing_to_check() -> None:
    return None


def _clipped(transfer: Transfer, part: SourceTensor) -> list[Transfer]:
    """What of a copy from the whole tensor comes from this part; raises `unsupported` where no box can say that."""
    if part.shard is None:
        return [transfer]
    clipped = clip_to_region(transfer, part.shard.whole, part.shard.offsets, part.shape)
    if clipped is None:
        message = f"{part.name}: its shards do not suit how the engine splits it; send it whole, through buckets"
        raise ProtocolError(ErrorCode.UNSUPPORTED, message)
    return clipped


def _in_memory(transfer: Transfer, part: SourceTensor) -> Transfer:
    """The copy, its source counted in elements of the part's segment; raises `unsupported` for strides that no box can
    follow."""
    whole, strides = part.whole_shape, part.resolved_strides
    split = split_like(transfer, whole)
    box = follow_strides(split.source, whole, strides)
    if box is None:
        message = f"{part.name}: strides {list(strides)} do not suit how the engine splits it; make it contiguous"
        raise ProtocolError(ErrorCode.UNSUPPORTED, message)
    offsets = part.shard.offsets if part.shard else (0,) * len(whole)
    before = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return Transfer(box.moved(_first_element(part) - before), split.target).merged()


def _first_element(part: SourceTensor) -> int:
    """Counted from the segment's start, in elements."""
    return part.offset_bytes // torch_dtype(part.dtype).itemsize
