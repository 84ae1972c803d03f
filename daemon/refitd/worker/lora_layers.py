"""What vLLM puts around a model's layers for LoRA, out of the way of its own loaders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.lora.layers import BaseLayerWithLoRA


@contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Meanwhile the model is as it was built: vLLM 0.26 finds no weight of a wrapped layer."""
    wrappers = [
        (parent._modules, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    try:
        for children, name, wrapper in wrappers:
            children[name] = wrapper.base_layer
        yield
    finally:
        for children, name, wrapper in wrappers:
            children[name] = wrapper
