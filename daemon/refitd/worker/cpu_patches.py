"""Keeps vLLM's CPU weights where a refit can write them.

vLLM packs linear and expert weights for its CPU kernels and drops or replaces the plain ones, so that a later update
either fails or leaves the packed copy stale. These patches keep the plain parameters, and a packed shadow beside them
for the kernels: of experts it is renewed at once after a write, of linear layers when it is used the next time, so that
a refit does not wait for it. They must be in place before the model loads, which is why the worker extension applies
them at its import.

One more makes pipeline stages work: vLLM allocates what a stage receives in a warm-up that it skips on eager CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

_EXPERT_WEIGHTS = ("w13_weight", "w2_weight")

if current_platform.is_cpu():
    from vllm.model_executor.kernels.linear.zentorch_utils import is_zentorch_moe_supported
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    _pack_linear = utils.dispatch_cpu_unquantized_gemm
    _pack_experts = CPUUnquantizedExperts.process_weights_after_loading
    _apply_experts: Callable[..., None] = CPUUnquantizedExperts.apply
    _receive_hidden_states: Callable[..., Any] = CPUModelRunner.sync_and_gather_intermediate_tensors
    _LORA_KERNELS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def apply_cpu_patches() -> None:
    """Does nothing on other devices; may be called again."""
    if current_platform.is_cpu():
        # vLLM's attention kernels use AMX where the CPU has it, but ask the system for it only in compiled mode:
        # without this an eager bf16 engine can end with SIGILL.
        torch.cpu._init_amx()
        _replace(utils, "dispatch_cpu_unquantized_gemm", _keep_linear_plain)
        _replace(CPUUnquantizedExperts, "process_weights_after_loading", _keep_experts_plain)
        _replace(CPUUnquantizedExperts, "apply", _apply_packed_experts)
        _replace(CPUModelRunner, "sync_and_gather_intermediate_tensors", _receive_into_allocated)
        _keep_adapters_apart()


def renew_shadows(model: torch.nn.Module) -> None:
    """Makes what the kernels use follow the plain weights; must run after every write to them."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        shadow = vars(module).get("cpu_linear")
        if isinstance(shadow, PackedLinear):
            shadow.forget()
    for layer, experts in _patched_experts(model):
        _pack_beside(experts, layer)


class PackedLinear:
    """A linear layer's kernel with weights in its own order, packed anew at the first use after `forget`.

    About twice as fast as the plain kernel, of which small layers feel the overhead and large ones the memory.
    """

    def __init__(self) -> None:
        self._kernel: Callable[..., torch.Tensor] | None = None

    def forget(self) -> None:
        self._kernel = None

    def __call__(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._kernel is None:
            layer = SimpleNamespace(weight=weight)
            _pack_linear(layer, remove_weight=False)
            self._kernel = layer.cpu_linear
        return self._kernel(inputs, weight, bias)


def has_packed_experts(module: torch.nn.Module) -> bool:
    """Whether the module's expert weights are packed themselves, without plain ones beside them."""
    experts = _cpu_experts(module)
    return experts is not None and not experts._use_zentorch and not hasattr(experts, "refitd_packed")


def _replace(owner: object, name: str, replacement: Callable[..., None]) -> None:
    setattr(owner, name, replacement)


def _keep_adapters_apart() -> None:
    """vLLM's LoRA kernels for the CPU take -1, no adapter, for an index: in a mixed batch the base model's tokens would
    get the adapter of the last slot.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in _LORA_KERNELS:
        kernel = getattr(lora_ops, name)
        if not hasattr(kernel, "__wrapped__"):
            for module in (lora_ops, punica_cpu):
                _replace(module, name, _without_base_tokens(kernel))


def _without_base_tokens(kernel: Callable[..., None]) -> Callable[..., None]:
    """Tokens without an adapter contribute zero."""

    @functools.wraps(kernel)
    def run(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        adapters: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> None:
        kernel(inputs.masked_fill((adapters < 0).unsqueeze(1), 0), weights, output, adapters, *rest, **options)

    return run


def _keep_linear_plain(layer: Any, remove_weight: bool) -> None:
    if layer.weight.ndim != 2:
        _pack_linear(layer, remove_weight)
    elif _can_be_packed(layer):
        layer.cpu_linear = PackedLinear()
    else:
        layer.cpu_linear = torch.nn.functional.linear


def _can_be_packed(layer: Any) -> bool:
    """A compiled model would go on with the first shadow it has seen; a bias would have to be of another dtype."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.model_config.enforce_eager and getattr(layer, "bias", None) is None


def _keep_experts_plain(experts: Any, layer: Any) -> None:
    # Padding also replaces the data of a bias, where no shadow can stand in for it.
    if hasattr(layer, "w13_bias") or is_zentorch_moe_supported(layer):
        _pack_experts(experts, layer)
    else:
        _pack_beside(experts, layer)


def _pack_beside(experts: Any, layer: Any) -> None:
    plain = {name: getattr(layer, name) for name in _EXPERT_WEIGHTS}
    _pack_experts(experts, layer)
    experts.refitd_packed = {name: getattr(layer, name).data for name in _EXPERT_WEIGHTS}
    for name, parameter in plain.items():
        setattr(layer, name, parameter)


def _apply_packed_experts(experts: Any, *args: Any, w1: torch.Tensor, w2: torch.Tensor, **kwargs: Any) -> None:
    packed = getattr(experts, "refitd_packed", None)
    if packed is not None:
        w1, w2 = packed["w13_weight"], packed["w2_weight"]
    _apply_experts(experts, *args, w1=w1, w2=w2, **kwargs)


def _receive_into_allocated(runner: Any, *args: Any, **kwargs: Any) -> Any:
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
    return _receive_hidden_states(runner, *args, **kwargs)


def _patched_experts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    for layer in model.modules():
        experts = _cpu_experts(layer)
        if experts is not None and hasattr(experts, "refitd_packed"):
            yield layer, experts


def _cpu_experts(layer: torch.nn.Module) -> Any:
    if not current_platform.is_cpu():
        return None
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return experts if isinstance(experts, CPUUnquantizedExperts) else None
