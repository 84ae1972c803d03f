"""The engine's weights as a refit sees them: what it expects, the plan, and the parameters to write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.names import added_prefix, prefix_advice
from refit_protocol.tensors import FLOAT_DTYPES, DType, TensorShape
from refitd.worker.copies import wait_for_stream
from refitd.worker.cpu_patches import renew_shadows
from refitd.worker.loading import opaque_modules, reload, tied_heads, vocabulary_parameters
from refitd.worker.manifest import Shapes, checkpoint_shapes
from refitd.worker.plan import Plan, compile_plan
from refitd.worker.trace import Trace, trace_loader

MAX_NAMES_IN_DETAILS = 100
_parameters_of = attrgetter("_parameters")


@dataclass(frozen=True)
class Expected:
    """A checkpoint tensor; `dtype` is what the engine keeps it in, `alias_of` the one it shares memory with there."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    optional: bool
    alias_of: str | None


class EngineWeights:
    """Owns the plan, and everything that follows from where the engine's parameters lie; `refresh` keeps it true."""

    plan: Plan
    expected: Mapping[str, Expected]
    aliases: Mapping[str, str]
    """Tensors that share another one's parameter, with that one's name."""
    on_several_stages: Collection[str]
    """Parameters that other pipeline stages, which differ in all else, may hold too: tied embeddings."""

    def __init__(self, model_runner: Any, vllm_config: VllmConfig, device: torch.device) -> None:
        self.device = device
        self.proven_plan: Plan | None = None
        self._model_runner = model_runner
        self._vllm_config = vllm_config
        self._shapes: Shapes | None = None
        self._demoted: dict[str, str] = {}
        self._compile()

    @property
    def model(self) -> torch.nn.Module:
        found: torch.nn.Module = self._model_runner.get_model()
        return found

    @property
    def model_dtype(self) -> torch.dtype:
        dtype = self._vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype), "vLLM resolves it before it loads a model"
        return dtype

    def refresh(self) -> None:
        """Makes the plan anew if parameters moved since; to be called before each use of it."""
        if not self._sites.are_unchanged():
            self._compile()

    def flat(self, parameter: str) -> torch.Tensor:
        """All elements of a planned parameter as one dimension, sharing its memory; the same object every time."""
        return self._flat[parameter]

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Through vLLM's loader; see `loading.reload`. The tensors may be overwritten afterwards."""
        reload(self._model_runner, self._vllm_config, tensors)
        wait_for_stream(self.device)

    def after_write(self) -> None:
        """Renews what the engine derives from its parameters."""
        renew_shadows(self.model)
        # vLLM 0.26 keeps no state of adapters that follows from the base weights, and has nothing to reset.
        if self._vllm_config.lora_config is not None and hasattr(self._model_runner, "reset_lora_state"):
            self._model_runner.reset_lora_state()

    def demote(self, modules: Mapping[str, str]) -> None:
        """From now on these modules go through vLLM's loader, for the reason given."""
        self._demoted.update(modules)
        self._compile()

    def kept_tensors(self) -> dict[str, torch.Tensor]:
        """Everything that makes up the served weights, each memory once; raises `unsupported` if there is more."""
        if self._vllm_config.model_config.use_mla:
            message = 'latent attention keeps matrices that cannot be put back: set refit.keep_last = "none"'
            raise ProtocolError(ErrorCode.UNSUPPORTED, message)
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def check_manifest(self, tensors: Collection[TensorShape], *, complete: bool = True) -> None:
        """Raises `manifest_mismatch` listing what is missing (if `complete`), unexpected, of wrong shape or dtype."""
        given = {tensor.name: tensor for tensor in tensors}
        known = [(tensor, self.expected[tensor.name]) for tensor in tensors if tensor.name in self.expected]
        required = [name for name, expected in self.expected.items() if not expected.optional] if complete else []
        problems: dict[str, list[Any]] = {
            "missing": [name for name in required if name not in given],
            "unexpected": [name for name in given if name not in self.expected],
            "shape": [
                {"name": tensor.name, "expected": list(expected.shape), "given": list(tensor.shape)}
                for tensor, expected in known
                if tensor.shape != expected.shape
            ],
            "dtype": [
                {"name": tensor.name, "expected": expected.dtype.value, "given": tensor.dtype.value}
                for tensor, expected in known
                if not _castable(tensor.dtype, expected.dtype)
            ],
        }
        if any(problems.values()):
            raise _mismatch(problems)

    def check_selection(self, names: Collection[str], available: Collection[str]) -> None:
        """Raises `manifest_mismatch` for names the engine or the source does not know, or a head without the embedding
        it is tied to."""
        unexpected = [name for name in names if name not in self.expected or name not in available]
        missing = [self.aliases[name] for name in names if self.aliases.get(name, name) not in names]
        if unexpected or missing:
            raise _mismatch({"missing": missing, "unexpected": unexpected, "shape": [], "dtype": []})

    def _compile(self) -> None:
        config = self._vllm_config.model_config
        if self._shapes is None:
            self._shapes = checkpoint_shapes(config.model, config.hf_config)
        with set_current_vllm_config(self._vllm_config):
            trace = trace_loader(self.model, [(name, shape, self.model_dtype) for name, shape in self._shapes.items()])
        parameters = dict(self.model.named_parameters())
        opaque = {**opaque_modules(self.model, config.use_mla), **self._demoted}
        self.plan = compile_plan(trace, self._shapes, parameters, opaque)
        pipelined = self._vllm_config.parallel_config.pipeline_parallel_size > 1
        ties = _tied_by_name(self._shapes, config.hf_text_config) if pipelined else _tied_tensors(self.model, trace)
        self.aliases = {**ties, **self.plan.aliases}
        dtypes = {copy.tensor: parameters[copy.parameter].dtype for copy in trace.copies}
        self.expected = _expected(self._shapes, self.plan, self.aliases, dtypes, self.model_dtype)
        self.on_several_stages = vocabulary_parameters(self.model) if pipelined else ()
        self._flat = {name: parameters[name].detach().view(-1) for name in self.plan.parameters}
        self._sites = _Sites(self.model, {name: parameters[name] for name in self.plan.parameters})


def dtype_of(dtype: torch.dtype) -> DType:
    return DType(str(dtype).removeprefix("torch."))


def torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.value)
    return found


class _Sites:
    """Where parameters hang and where they lie. Asked before every refit, so all of them at once and without a loop in
    Python: hundreds of parameters looked at one by one took a tenth of the time of the copy."""

    def __init__(self, model: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
        paths = [name.rpartition(".") for name in parameters]
        self._modules = [model.get_submodule(module) for module, _, _ in paths]
        self._leaves = [leaf for _, _, leaf in paths]
        self._parameters = list(parameters.values())
        self._addresses = self._present_addresses()

    def are_unchanged(self) -> bool:
        present = map(dict.get, map(_parameters_of, self._modules), self._leaves)
        return all(map(is_, present, self._parameters)) and self._present_addresses() == self._addresses

    def _present_addresses(self) -> list[int]:
        # vLLM's parameters are a subclass whose every method goes through Python, three microseconds each.
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(torch.Tensor.data_ptr, self._parameters))


def _expected(
    shapes: Shapes, plan: Plan, aliases: Mapping[str, str], dtypes: Mapping[str, torch.dtype], default: torch.dtype
) -> dict[str, Expected]:
    every = {**shapes, **{alias: shapes[name] for alias, name in aliases.items()}}
    return {
        name: Expected(
            name=name,
            dtype=dtype_of(dtypes.get(aliases.get(name, name), default)),
            shape=shape,
            optional=name in aliases or name in plan.unused,
            alias_of=aliases.get(name),
        )
        for name, shape in every.items()
    }


def _tied_tensors(model: torch.nn.Module, trace: Trace) -> dict[str, str]:
    """The loader skips a tied head, but trainers may send it all the same, under the last two parts of its name."""
    loaded = {copy.parameter: copy.tensor for copy in trace.copies}
    tied = {".".join(head.split(".")[-2:]): loaded.get(embedding) for head, embedding in tied_heads(model).items()}
    return {alias: name for alias, name in tied.items() if name is not None and name != alias}


def _tied_by_name(shapes: Shapes, hf_text_config: Any) -> dict[str, str]:
    """No pipeline stage but the last has the head, and only two have the embedding."""
    embeddings = [name for name in shapes if name.endswith("embed_tokens.weight")]
    if not embeddings or not getattr(hf_text_config, "tie_word_embeddings", False):
        return {}
    return {"lm_head.weight": embeddings[0]}


def _castable(given: DType, expected: DType) -> bool:
    return given == expected or (given in FLOAT_DTYPES and expected in FLOAT_DTYPES)


def _mismatch(problems: Mapping[str, list[Any]]) -> ProtocolError:
    said = [f"{len(items)} {what} ({_first_of(items)})" for what, items in problems.items() if items]
    details = {what: items[:MAX_NAMES_IN_DETAILS] for what, items in problems.items()}
    advice = prefix_advice(added_prefix(problems["unexpected"], problems["missing"]))
    message = f"the tensors do not fit the engine's model: {', '.join(said)}{advice}"
    return ProtocolError(ErrorCode.MANIFEST_MISMATCH, message, **details)


def _first_of(items: list[Any]) -> str:
    said = [
        f"{item['name']} is {item['given']} instead of {item['expected']}" if isinstance(item, dict) else item
        for item in items[:3]
    ]
    return ", ".join(said) + (", ..." if len(items) > 3 else "")
