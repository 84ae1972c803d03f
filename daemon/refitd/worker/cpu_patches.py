"""Keeps vLLM's CPU weights where a refit can write them.

vLLM packs linear and expert weights for its CPU kernels and drops or replaces the plain ones, so that a later update either
fails or leaves the packed copy stale. These patches keep the plain parameters: linear layers use them directly; experts
keep a packed shadow beside them, which `repack_experts` renews after an update. They must be in place before the model
loads, which is why the worker extension applies them at its import.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.platforms import current_platform

_pack_for_kernel = utils.dispatch_cpu_unquantized_gemm
_pack_experts = cpu_moe.CPUUnquantizedExperts.process_weights_after_loading
_apply_experts = cpu_moe.CPUUnquantizedExperts.apply


def apply_cpu_patches() -> None:
    """Does nothing on other devices; may be called again."""
    if not current_platform.is_cpu():
        return
    utils.dispatch_cpu_unquantized_gemm = _keep_plain


def _keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:
        _pack_for_kernel(layer, remove_weight)
