"""Tiny random checkpoints of the architectures the tests load into a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

Kind = Literal["qwen3", "qwen3_tied", "llama", "qwen3_moe", "mixtral"]

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def config(kind: Kind, **overrides: object) -> PreTrainedConfig:
    """The configuration of a two-layer model of this kind; `overrides` replace single values."""
    values = {**_COMMON, "tie_word_embeddings": kind == "qwen3_tied", **overrides}
    match kind:
        case "qwen3" | "qwen3_tied":
            return Qwen3Config(**{"intermediate_size": 256, **values})
        case "llama":
            return LlamaConfig(**{"intermediate_size": 256, **values})
        case "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
            return Qwen3MoeConfig(**{"intermediate_size": 256, **experts, **values})
        case "mixtral":
            return MixtralConfig(
                **{"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, **values}
            )


def random_model(kind: Kind, seed: int, dtype: torch.dtype = torch.bfloat16, **overrides: object) -> PreTrainedModel:
    """A model with random weights that depend on `seed` alone; norms are random too, so that a stale one shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(kind, **overrides), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    return model.eval()


def build_model(kind: Kind, path: Path, seed: int, dtype: torch.dtype = torch.bfloat16, **overrides: object) -> Path:
    """Writes such a model as a checkpoint (without a tokenizer) to the folder `path` and returns it."""
    random_model(kind, seed, dtype, **overrides).save_pretrained(path)
    return path
