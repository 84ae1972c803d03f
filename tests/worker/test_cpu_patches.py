"""What the patched CPU kernels compute with: the weights of the last refit, not packed copies of older ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import utils

from refitd.worker.cpu_patches import PackedLinear
from tests.worker.engines import LoadedWorker
from tests.worker.models import Kind
from tests.worker.trainers import ExportedTensors

Weights = dict[str, torch.Tensor]


def forward(worker: LoadedWorker, module: str, inputs: torch.Tensor) -> torch.Tensor:
    """One module's output, as the engine would compute it."""
    config = worker.worker.vllm_config
    with (
        torch.inference_mode(),
        set_current_vllm_config(config),
        set_forward_context(None, config, num_tokens=len(inputs)),
    ):
        output = worker.model.get_submodule(module)(inputs.clone())
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("qwen3_moe", "model.layers.1.mlp"),
        ("mixtral", "model.layers.0.block_sparse_moe"),
        ("qwen3", "model.layers.1.mlp"),
        ("qwen3", "model.layers.0.self_attn.qkv_proj"),
    ],
)
def test_kernels_use_the_refitted_weights(
    kind: Kind,
    module: str,
    worker_of: Callable[[Kind], LoadedWorker],
    workers: Callable[[Kind, int], LoadedWorker],
    weights_of: Callable[[Kind, int], Weights],
) -> None:
    """After each refit the output equals, exactly, that of a worker that has just loaded these weights."""
    refitted, loaded = worker_of(kind), workers(kind, 1)
    inputs = torch.randn(9, 128).to(torch.bfloat16)
    with ExportedTensors(weights_of(kind, 0)) as trainer:
        refitted.call("refitd_open_source", 1, "inplace", *trainer.source)
        refitted.call("refitd_commit", 1)
        before = forward(refitted, module, inputs)
        for name, tensor in weights_of(kind, 1).items():
            trainer.tensors[name].copy_(tensor)
        refitted.call("refitd_commit", 1)
        refitted.call("refitd_close_source", 1)
    after = forward(refitted, module, inputs)
    assert torch.equal(after, forward(loaded, module, inputs))
    assert not torch.equal(after, before)


def test_linear_layers_are_packed_where_no_compiler_would_keep_the_first_weights(
    worker_of: Callable[[Kind], LoadedWorker],
) -> None:
    """Eager engines get the fast kernels; a compiled one, and a layer with a bias, the plain one."""
    loaded = worker_of("qwen3")
    layer = loaded.model.get_submodule("model.layers.0.self_attn.qkv_proj")
    assert isinstance(layer.cpu_linear, PackedLinear)
    compiled = copy.deepcopy(loaded.worker.vllm_config)
    compiled.model_config.enforce_eager = False
    for config, bias in ((compiled, None), (loaded.worker.vllm_config, torch.zeros(8))):
        other = SimpleNamespace(weight=torch.zeros(8, 8), bias=bias)
        with set_current_vllm_config(config):
            utils.dispatch_cpu_unquantized_gemm(other, remove_weight=True)
        assert other.cpu_linear is torch.nn.functional.linear
