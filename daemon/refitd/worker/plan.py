"""The plan: which elements of which checkpoint tensor go to which elements of which engine parameter.

A plan belongs to the engine, not to a source: it counts row-major elements of checkpoint tensors, and sources bring
their own offsets, strides and dtypes. It is compiled once from a trace of vLLM's loader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.worker.boxes import Box, Transfer
from refitd.worker.trace import Trace, TracedCopy


@dataclass(frozen=True)
class Route:
    """One planned copy, from row-major elements of a checkpoint tensor to elements of a parameter."""

    tensor: str
    parameter: str
    transfer: Transfer

    @property
    def module(self) -> str:
        return _module_of(self.parameter)


@dataclass(frozen=True)
class Plan:
    """`routes` by checkpoint tensor; `loader_only` names tensors that must go through vLLM's loader, and why.

    `aliases` names tensors that the loader would put where another one already is (tied heads), `unused` those it
    ignores. `parameters` are the planned ones; `module_tensors` are the tensors that fill the same modules as a tensor.
    """

    routes: Mapping[str, tuple[Route, ...]]
    loader_only: Mapping[str, str]
    aliases: Mapping[str, str]
    unused: frozenset[str]
    parameters: frozenset[str]
    module_tensors: Mapping[str, frozenset[str]]

    def check_whole_modules(self, loader_tensors: Collection[str], selected: Collection[str]) -> None:
        """Raises `plan_required` if vLLM's loader would get only some of a module's tensors and so break the module."""
        absent = {
            other
            for name in loader_tensors
            for other in self.module_tensors.get(name, self.loader_only.keys())
            if other not in selected
        }
        if absent:
            raise ProtocolError(
                ErrorCode.PLAN_REQUIRED,
                "tensors that go through the engine's loader can only be updated a whole layer at a time; "
                f"also name {', '.join(sorted(absent)[:5])}",
                absent=sorted(absent)[:100],
            )


def refuse_loader(loader_tensors: Mapping[str, str], setting: str) -> None:
    """Raises `plan_required` where the setting is "require" and tensors would go through vLLM's loader."""
    if setting == "require" and loader_tensors:
        message = f"{len(loader_tensors)} tensors cannot be planned, and the plan is required"
        raise ProtocolError(ErrorCode.PLAN_REQUIRED, message, loader_tensors=listed(loader_tensors))


def listed(loader_tensors: Mapping[str, str]) -> list[dict[str, str]]:
    """As the daemon is told of them."""
    return [{"name": name, "why": why} for name, why in loader_tensors.items()]


def compile_plan(
    trace: Trace, tensors: Iterable[str], parameters: Mapping[str, torch.Tensor], opaque_modules: Mapping[str, str]
) -> Plan:
    """Keeps the parameters that plain copies (and constant padding) cover element for element exactly once.

    `opaque_modules` names modules whose parameters never count as plain, and why. A module is planned as a whole or not
    at all, because vLLM's layerwise reload fills a module as a whole.
    """
    names = list(tensors)
    if trace.failure is not None:
        why = f"vLLM's loader could not be traced ({trace.failure})"
        return Plan({}, dict.fromkeys(names, why), {}, frozenset(), frozenset(), {})
    aliases = _aliases(trace.copies)
    copies = [copy for copy in trace.copies if copy.tensor not in aliases]
    loader_only = _loader_only(copies, trace, parameters, opaque_modules)
    routes = _routes(copies, loader_only)
    planned = {route.parameter for of_tensor in routes.values() for route in of_tensor}
    used = {*routes, *loader_only, *aliases}
    return Plan(
        routes=routes,
        loader_only=loader_only,
        aliases=aliases,
        unused=frozenset(name for name in names if name not in used),
        parameters=frozenset(planned),
        module_tensors=_module_tensors(copies, trace),
    )


def _module_tensors(copies: list[TracedCopy], trace: Trace) -> dict[str, frozenset[str]]:
    filled: dict[str, set[str]] = defaultdict(set)
    for copy in copies:
        filled[_module_of(copy.parameter)].add(copy.tensor)
    for parameter, names in trace.tensors_of_opaque.items():
        filled[_module_of(parameter)].update(names)
    together: dict[str, set[str]] = defaultdict(set)
    for names in filled.values():
        for name in names:
            together[name] |= names
    return {name: frozenset(names) for name, names in together.items()}


def _aliases(copies: list[TracedCopy]) -> dict[str, str]:
    """Tensors that go to exactly the elements another one goes to; of the two, a head is the alias of an embedding."""
    placed: dict[tuple[str, Transfer], list[str]] = defaultdict(list)
    for copy in copies:
        placed[copy.parameter, copy.transfer].append(copy.tensor)
    aliases: dict[str, str] = {}
    for names in placed.values():
        first, *others = sorted(set(names), key=lambda name: ("head" in name, names.index(name)))
        aliases.update(dict.fromkeys(others, first))
    return aliases


def _loader_only(
    copies: list[TracedCopy], trace: Trace, parameters: Mapping[str, torch.Tensor], opaque_modules: Mapping[str, str]
) -> dict[str, str]:
    reasons = _unplanned_parameters(copies, trace, parameters, opaque_modules)
    while True:
        tensors = _tensors_into(reasons, copies, trace)
        spoiled = {copy.parameter: tensors[copy.tensor] for copy in copies if copy.tensor in tensors}
        spread = _whole_modules({**spoiled, **reasons}, parameters)
        if spread.keys() == reasons.keys():
            return tensors
        reasons = spread


def _unplanned_parameters(
    copies: list[TracedCopy],
    trace: Trace,
    parameters: Mapping[str, torch.Tensor],
    opaque_modules: Mapping[str, str],
) -> dict[str, str]:
    into: dict[str, list[Box]] = defaultdict(list)
    for copy in copies:
        into[copy.parameter].append(copy.transfer.target)
    reasons: dict[str, str] = {}
    for name, parameter in parameters.items():
        why = opaque_modules.get(_module_of(name)) or trace.opaque.get(name)
        why = why or _why_not_covered(parameter, into[name], trace.fills.get(name, []))
        if why:
            reasons[name] = why
    return _whole_modules(reasons, parameters)


def _whole_modules(reasons: Mapping[str, str], parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    blocked = {_module_of(name): why for name, why in reasons.items()}
    return {name: blocked[_module_of(name)] for name in parameters if _module_of(name) in blocked}


def _why_not_covered(parameter: torch.Tensor, copied: list[Box], filled: list[Box]) -> str | None:
    if not parameter.is_contiguous():
        return f"the parameter is not contiguous (strides {list(parameter.stride())})"
    if not all(Transfer(box, box).merged().can_clip for box in copied):
        return "the loader interleaves its elements"
    runs = np.concatenate([_runs(box) for box in (*copied, *filled)] or [np.empty((0, 2), dtype=np.int64)])
    runs = runs[np.argsort(runs[:, 0])]
    expected = np.concatenate([[0], runs[:, 1]])
    if np.array_equal(np.concatenate([runs[:, 0], [parameter.numel()]]), expected):
        return None
    covered = int((runs[:, 1] - runs[:, 0]).sum())
    return f"plain copies cover {covered} of {parameter.numel()} elements, or some of them twice"


def _runs(box: Box) -> NDArray[np.int64]:
    """[start, end) of each run of consecutive elements of the box, one row each."""
    if not box.elements:
        return np.empty((0, 2), dtype=np.int64)
    merged = Transfer(box, box).merged().source
    sizes, strides = merged.sizes, merged.strides
    length = sizes[-1] if sizes and strides[-1] == 1 else 1
    outer = len(sizes) - 1 if sizes and strides[-1] == 1 else len(sizes)
    starts = np.array([box.offset], dtype=np.int64)
    for size, stride in zip(sizes[:outer], strides[:outer], strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return np.stack([starts, starts + length], axis=1)


def _tensors_into(unplanned: Mapping[str, str], copies: list[TracedCopy], trace: Trace) -> dict[str, str]:
    tensors = {copy.tensor: unplanned[copy.parameter] for copy in copies if copy.parameter in unplanned}
    for parameter, names in trace.tensors_of_opaque.items():
        tensors.update(dict.fromkeys(names, unplanned.get(parameter, trace.opaque[parameter])))
    return tensors


def _routes(copies: list[TracedCopy], loader_only: Mapping[str, str]) -> dict[str, tuple[Route, ...]]:
    routes: dict[str, list[Route]] = defaultdict(list)
    for copy in copies:
        if copy.tensor not in loader_only and copy.transfer.elements:
            routes[copy.tensor].append(Route(copy.tensor, copy.parameter, copy.transfer.merged()))
    return {name: tuple(of_tensor) for name, of_tensor in routes.items()}


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
