"""LoRA adapters for the tests' model, in the files that PEFT writes, with weights large enough to be seen."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

RANK = 4
SCALE = 2.0
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")

Weights = dict[str, torch.Tensor]


def adapter_weights(model: PreTrainedModel, seed: int, strength: float = 0.15) -> Weights:
    """By PEFT's names; `strength` is about the size of each change beside the weight it changes."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, linear in model.named_modules():
        if name.endswith(TARGETS):
            rows, columns = linear.weight.shape
            size = (strength * linear.weight.detach().std().item() / RANK**0.5 / SCALE) ** 0.5 * 2
            weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * size
            weights[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * size
    return weights


def write_adapter(path: Path, weights: Weights, rank: int = RANK) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, path / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in weights})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank, "target_modules": targets, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return path


def merged(model: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    """The model with the adapter added to its weights, in float32."""
    whole = copy.deepcopy(model).float()
    with torch.no_grad():
        for name, down in weights.items():
            if name.endswith("lora_A.weight"):
                up = weights[name.replace("lora_A", "lora_B")]
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                whole.get_submodule(module).weight += SCALE * up @ down
    return whole
