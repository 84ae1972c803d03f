"""In-place sources: a trainer's own parameters, mapped once and copied from at every commit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import DType, Segment, SourceTensor
from refitd.worker.attest import FullComparison, NamedCopy, SampledComparison
from refitd.worker.boxes import Transfer, follow_strides, split_like
from refitd.worker.copies import Copy
from refitd.worker.digest import samples
from refitd.worker.memory import Mapping as MemoryMapping
from refitd.worker.memory import open_segment
from refitd.worker.plan import Plan, Route
from refitd.worker.programs import Program, copy_program
from refitd.worker.weights import EngineWeights, torch_dtype

MAX_SELECTIONS = 32
PLAN_OFF = "the plan is switched off"


class Segments:
    """The mapped memory of one source, seen in any dtype."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self._mappings: list[MemoryMapping] = []
        self._typed: dict[tuple[int, DType], torch.Tensor] = {}
        try:
            for segment in segments:
                self._mappings.append(open_segment(segment, device))
        except BaseException:
            self.close()
            raise

    @classmethod
    def around(cls, mappings: Sequence[MemoryMapping]) -> Self:
        """Of memory that is there already."""
        segments = cls((), torch.device("cpu"))
        segments._mappings.extend(mappings)
        return segments

    def typed(self, segment: int, dtype: DType) -> torch.Tensor:
        """All whole elements of the segment, one-dimensional; the same object every time."""
        key = segment, dtype
        if key not in self._typed:
            data = self._mappings[segment].data
            item_bytes = torch_dtype(dtype).itemsize
            self._typed[key] = data[: data.shape[0] // item_bytes * item_bytes].view(torch_dtype(dtype))
        return self._typed[key]

    def wait_until_written(self, segment: int | None = None) -> None:
        """Until the trainer's writes so far, to one segment or all, can be read; raises `memory_unavailable` if they
        never end."""
        awaited = self._mappings if segment is None else [self._mappings[segment]]
        for written in {id(mapping.written): mapping.written for mapping in awaited}.values():
            if written is not None:
                written.wait()

    def close(self) -> None:
        self._typed.clear()
        for mapping in self._mappings:
            mapping.close()
        self._mappings.clear()


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


class InplaceSource:
    """Its tensors lie in mapped memory; offsets, strides and dtypes are the trainer's."""

    def __init__(self, segments: Segments, tensors: Sequence[SourceTensor], planned: bool) -> None:
        self._segments = segments
        self._planned = planned
        self._compiled: dict[frozenset[str] | None, CompiledSource] = {}
        self.tensors = {tensor.name: tensor for tensor in tensors}
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
        """The tensor in its own shape and strides, in trainer memory."""
        tensor = self.tensors[name]
        flat = self._segments.typed(tensor.segment, tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.resolved_strides, self.first_element(name))

    def flat(self, name: str) -> torch.Tensor:
        """All of the segment that holds the tensor, in the tensor's dtype."""
        tensor = self.tensors[name]
        return self._segments.typed(tensor.segment, tensor.dtype)

    def first_element(self, name: str) -> int:
        tensor = self.tensors[name]
        return tensor.offset_bytes // torch_dtype(tensor.dtype).itemsize

    def wait_until_written(self) -> None:
        self._segments.wait_until_written()

    def close(self) -> None:
        self._compiled.clear()
        self._segments.close()

    def transfer(self, route: Route) -> Transfer:
        """The route, its source counted in elements of `flat`; raises `unsupported` for strides no box can follow."""
        tensor = self.tensors[route.tensor]
        split = split_like(route.transfer, tensor.shape)
        box = follow_strides(split.source, tensor.shape, tensor.resolved_strides)
        if box is None:
            strides = list(tensor.resolved_strides)
            message = f"{tensor.name}: strides {strides} do not suit how the engine splits it; make it contiguous"
            raise ProtocolError(ErrorCode.UNSUPPORTED, message)
        return Transfer(box.moved(self.first_element(route.tensor)), split.target).merged()

    def _make_room(self, plan: Plan) -> None:
        current = {key: found for key, found in self._compiled.items() if found.plan is plan}
        self._compiled = current if len(current) < MAX_SELECTIONS else {}

    def _compile(self, weights: EngineWeights, names: Collection[str]) -> CompiledSource:
        plan = weights.plan
        loader_tensors = {name: plan.loader_only[name] for name in names if name in plan.loader_only}
        if not self._planned:
            loader_tensors = {name: PLAN_OFF for name in names if name in plan.routes or name in plan.loader_only}
        plan.check_whole_modules(loader_tensors, names)
        routes = [route for name in names if name not in loader_tensors for route in plan.routes.get(name, ())]
        copies = tuple(self._named_copy(weights, route) for route in routes)
        program = copy_program([named.copy for named in copies])
        by_route = dict(zip(routes, copies, strict=True))
        return CompiledSource(
            plan=plan,
            names=frozenset(names),
            copies=copies,
            program=program,
            comparison=SampledComparison([(by_route[s.route], s.ordinals) for s in samples(weights, routes)]),
            full_comparison=FullComparison(copies),
            loader_tensors=loader_tensors,
            size_bytes=program.size_bytes + sum(self.tensors[name].size_bytes for name in loader_tensors),
        )

    def _named_copy(self, weights: EngineWeights, route: Route) -> NamedCopy:
        copy = Copy(self.flat(route.tensor), weights.flat(route.parameter), self.transfer(route))
        return NamedCopy(route.tensor, copy)
