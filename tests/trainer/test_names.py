"""Modules under their checkpoints' names, judged by what transformers itself writes to disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from refit_trainer.names import bare_module, checkpoint_tensors
from tests.worker.models import random_model


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied", "llama", "qwen3_moe", "mixtral"])
def test_names_and_values_are_those_of_the_saved_checkpoint(kind: str, tmp_path: Path) -> None:
    """Fused experts come one by one, a tied head not at all, everything as save_pretrained writes it."""
    model = random_model(kind, seed=3)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = checkpoint_tensors(model)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_are_views(kind: str) -> None:
    """No expert is copied: a step on the fused parameter shows in every one of its views."""
    model = random_model(kind, seed=3)
    found = checkpoint_tensors(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    assert all((tensor == 0.5).all() for tensor in found.values())


def test_wrappers_are_seen_through() -> None:
    """torch.compile does not change the names."""
    model = torch.nn.Linear(2, 2)
    assert bare_module(torch.compile(model)) is model
    assert checkpoint_tensors(torch.compile(model)).keys() == {"weight", "bias"}


def test_only_persistent_buffers_are_checkpoint_tensors() -> None:
    """As in a state dict."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    model[0].register_buffer("scratch", torch.zeros(2), persistent=False)
    assert checkpoint_tensors(model).keys() == model.state_dict().keys()
