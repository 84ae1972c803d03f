"""The checkpoint tensors vLLM's loader expects, from the checkpoint's headers or else from the architecture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

Shapes = dict[str, tuple[int, ...]]


def checkpoint_shapes(model_path: str, hf_config: Any) -> Shapes:
    """Row-major shapes by Hugging Face name (`model.layers.0.self_attn.q_proj.weight`)."""
    files = sorted(Path(model_path).glob("*.safetensors"))
    return dict(_header_shapes(files)) if files else architecture_shapes(hf_config)


def _header_shapes(files: list[Path]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, tuple(tensors.get_slice(name).get_shape())


def architecture_shapes(hf_config: Any) -> Shapes:
    """Of the model that transformers would build, under the names it would save, without allocating memory."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    saved = revert_weight_conversion(model, dict(model.state_dict()))
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}
