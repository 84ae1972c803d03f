"""The engine's weights as a refit sees them: what it expects, the plan, and the parameters to write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import FLOAT_DTYPES, DType, SourceTensor, TensorShape
from refitd.worker.loading import opaque_modules, reload
from refitd.worker.manifest import Shapes, checkpoint_shapes
from refitd.worker.plan import Plan, compile_plan
from refitd.worker.trace import Trace, trace_loader

MAX_NAMES_IN_DETAILS = 100


@dataclass(frozen=True)
class Expected:
    """A checkpoint tensor; `dtype` is what the engine keeps it in. `alias_of` names the tensor whose memory it shares."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    optional: bool
    alias_of: str | None


class EngineWeights:
    """Owns the plan; recompiles it when the engine's parameters moved."""

    def __init__(self, model_runner: Any, vllm_config: VllmConfig, device: torch.device) -> None:
        self.device = device
        self._model_runner = model_runner
        self._vllm_config = vllm_config
        self._shapes: Shapes | None = None
        self._plan: Plan | None = None
        self._expected: dict[str, Expected] = {}
        self._flat: dict[str, torch.Tensor] = {}
        self._demoted: dict[str, str] = {}

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._model.named_parameters())

    @property
    def plan(self) -> Plan:
        """The plan for where the parameters lie now; a new object whenever they moved."""
        if self._plan is None or self._plan.has_moved(self.parameters):
            self._compile()
        assert self._plan is not None
        return self._plan

    @property
    def expected(self) -> Mapping[str, Expected]:
        _ = self.plan
        return self._expected

    def flat(self, parameter: str) -> torch.Tensor:
        """All elements of a planned parameter as one dimension, sharing its memory."""
        return self._flat[parameter]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tensors that share another one's parameter, with that one's name."""
        return {name: e.alias_of for name, e in self.expected.items() if e.alias_of is not None}

    def check_known(self, names: Collection[str]) -> None:
        """Raises `manifest_mismatch` for names the engine does not know."""
        unexpected = [name for name in names if name not in self.expected]
        if unexpected:
            raise _mismatch({"missing": [], "unexpected": unexpected, "shape": [], "dtype": []})

    def demote(self, modules: Mapping[str, str]) -> None:
        """From now on these modules go through vLLM's loader, for the reason given; the plan is made anew."""
        self._demoted.update(modules)
        self._plan = None

    def after_write(self) -> None:
        """Renews what the engine derives from its parameters."""
        if self._vllm_config.lora_config is not None:
            self._model_runner.reset_lora_state()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Through vLLM's loader; see `loading.reload`."""
        reload(self._model_runner, self._vllm_config, tensors)

    def check_manifest(self, tensors: Iterable[TensorShape | SourceTensor]) -> None:
        """Raises `manifest_mismatch` that lists everything missing, unexpected, or of a wrong shape or dtype."""
        given = {tensor.name: tensor for tensor in tensors}
        expected = self.expected
        problems: dict[str, list[Any]] = {
            "missing": [e.name for e in expected.values() if not e.optional and e.name not in given],
            "unexpected": [name for name in given if name not in expected],
            "shape": [
                {"name": name, "expected": list(expected[name].shape), "given": list(tensor.shape)}
                for name, tensor in given.items()
                if name in expected and tensor.shape != expected[name].shape
            ],
            "dtype": [
                {"name": name, "expected": expected[name].dtype.value, "given": tensor.dtype.value}
                for name, tensor in given.items()
                if name in expected and not _castable(tensor.dtype, expected[name].dtype)
            ],
        }
        if any(problems.values()):
            raise _mismatch(problems)

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._model_runner.get_model()
        return model

    def _compile(self) -> None:
        config = self._vllm_config.model_config
        if self._shapes is None:
            self._shapes = checkpoint_shapes(config.model, config.hf_config)
        with set_current_vllm_config(self._vllm_config):
            trace = trace_loader(self._model, [(name, shape, config.dtype) for name, shape in self._shapes.items()])
        parameters = self.parameters
        opaque = {**opaque_modules(self._model, config.use_mla), **self._demoted}
        plan = compile_plan(trace, self._shapes, parameters, opaque)
        tied = _tied_heads(self._model, trace, self._shapes)
        self._expected = _expected(self._shapes, plan, trace, tied, parameters, config.dtype)
        self._flat = {name: parameters[name].detach().view(-1) for name in plan.addresses}
        self._plan = plan


def _expected(
    shapes: Shapes,
    plan: Plan,
    trace: Trace,
    tied: Mapping[str, str],
    parameters: Mapping[str, torch.Tensor],
    default: torch.dtype,
) -> dict[str, Expected]:
    dtypes = {copy.tensor: parameters[copy.parameter].dtype for copy in trace.copies}
    aliases = {**tied, **plan.aliases}
    shapes = {**shapes, **{alias: shapes[name] for alias, name in tied.items()}}
    return {
        name: Expected(
            name=name,
            dtype=dtype_of(dtypes.get(aliases.get(name, name), default)),
            shape=shape,
            optional=name in aliases or name in plan.unused,
            alias_of=aliases.get(name),
        )
        for name, shape in shapes.items()
    }


def _tied_heads(model: torch.nn.Module, trace: Trace, shapes: Shapes) -> dict[str, str]:
    """A head that is the embedding itself: the loader skips it, trainers may send it all the same."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    loaded = {copy.parameter: copy.tensor for copy in trace.copies}
    tied: dict[str, str] = {}
    for first, *others in names.values():
        for other in others:
            if first in loaded:
                tied[".".join(other.split(".")[-2:])] = loaded[first]
    return {alias: name for alias, name in tied.items() if name in shapes and alias != name}


def dtype_of(dtype: torch.dtype) -> DType:
    return DType(str(dtype).removeprefix("torch."))


def torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def _castable(given: DType, expected: DType) -> bool:
    return given == expected or (given in FLOAT_DTYPES and expected in FLOAT_DTYPES)


def _mismatch(problems: Mapping[str, list[Any]]) -> ProtocolError:
    said = [
        f"{len(items)} {what} ({', '.join(str(item['name'] if isinstance(item, dict) else item) for item in items[:3])})"
        for what, items in problems.items()
        if items
    ]
    details = {what: items[:MAX_NAMES_IN_DETAILS] for what, items in problems.items()}
    return ProtocolError(
        ErrorCode.MANIFEST_MISMATCH, "the tensors do not fit the engine's model: " + ", ".join(said), **details
    )
