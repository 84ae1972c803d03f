"""vLLM's own ways to load weights, as far as a refit uses them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

_PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)


def reload(model_runner: Any, vllm_config: VllmConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Layerwise reload: exact also for quantised and packed layers, and every parameter keeps its address.

    A module whose tensors are only partly given is left broken, so give all tensors of a module.
    """
    with set_current_vllm_config(vllm_config), torch.no_grad():
        model_runner.reload_weights(weights_iterator=iter(tensors), is_checkpoint_format=True)


def opaque_modules(model: torch.nn.Module, use_mla: bool) -> dict[str, str]:
    """Modules whose kernels read something else than their plain parameters, and why."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not isinstance(method, _PLAIN_METHODS):
            found[name] = f"its weights are processed by {type(method).__name__}"
        elif use_mla and name.endswith(".kv_b_proj"):
            found[name] = "latent attention derives other matrices from it"
    return found
