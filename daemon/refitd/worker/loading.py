"""vLLM's own ways to load weights, as far as a refit uses them, and what it keeps besides plain parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from refitd.worker.cpu_patches import has_packed_experts
from refitd.worker.lora_layers import unwrapped

# By exact name: a subclass may do anything to the weights.
_PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}


def reload(model_runner: Any, vllm_config: VllmConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Layerwise reload: exact also for quantised and packed layers, and every parameter keeps its address.

    A module whose tensors are only partly given is left broken, so give all tensors of a module.
    """
    with set_current_vllm_config(vllm_config), torch.no_grad(), unwrapped(model_runner.get_model()):
        model_runner.reload_weights(weights_iterator=iter(tensors), is_checkpoint_format=True)


def opaque_modules(model: torch.nn.Module, use_mla: bool) -> dict[str, str]:
    """Modules whose kernels read something else than their plain parameters, and why."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _PLAIN_METHODS:
            found[name] = f"its weights are processed by {type(method).__name__}"
        elif has_packed_experts(module):
            found[name] = "its expert weights are packed for the CPU"
        elif use_mla and name.endswith(".kv_b_proj"):
            found[name] = "latent attention derives other matrices from it"
    return found


def tied_heads(model: torch.nn.Module) -> dict[str, str]:
    """Heads that are the embedding too: `{"lm_head.weight": "model.embed_tokens.weight"}`, in the engine's names."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    heads = {
        f"{name.removesuffix('.base_layer')}.weight": first_names.get(id(getattr(module, "weight", None)))
        for name, module in model.named_modules()
        if isinstance(module, ParallelLMHead)
    }
    return {head: first for head, first in heads.items() if first is not None and first != head}


def vocabulary_parameters(model: torch.nn.Module) -> frozenset[str]:
    """Of embeddings and heads."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, VocabParallelEmbedding)]
    return frozenset(f"{name}.{leaf}" for name, module in modules for leaf, _ in module.named_parameters())
