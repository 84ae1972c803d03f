from __future__ import annotations

import pytest
import torch
from vllm.lora.layers import BaseLayerWithLoRA

from refitd.worker.lora_layers import unwrapped


class Wrapper(BaseLayerWithLoRA):
    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def tied_model() -> torch.nn.Module:
    """One wrapped layer that hangs in two places, and a plain one."""
    shared = Wrapper(torch.nn.Linear(2, 2))
    inner = torch.nn.ModuleDict({"embedding": shared, "plain": torch.nn.Linear(2, 2)})
    return torch.nn.ModuleDict({"inner": inner, "head": shared})


def names(model: torch.nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False) if name.endswith("weight")]


def test_a_loader_sees_the_model_without_its_wrappers() -> None:
    """Everywhere where a layer hangs; the parameters are the same objects."""
    model = tied_model()
    weight = model.get_parameter("head.base_layer.weight")
    with unwrapped(model):
        assert names(model) == ["inner.embedding.weight", "inner.plain.weight", "head.weight"]
        assert model.get_parameter("head.weight") is weight


def test_the_wrappers_are_back_afterwards_whatever_the_loader_did() -> None:
    """In their old order."""
    model = tied_model()
    before = names(model)
    with pytest.raises(ValueError, match="no such weight"), unwrapped(model):
        raise ValueError("no such weight")
    assert names(model) == before
    assert isinstance(model.get_submodule("head"), Wrapper)
