"""Case A: updates that went wrong for others."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.states import EngineState
from refit_trainer import Daemon, RefitdError, TensorShape
from tests.canary import unharmed
from tests.conftest import GREEDY, PROMPT, load_seed
from tests.worker.models import random_model


def tensors_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: value.detach().to(dtype) for name, value in random_model("qwen3", seed=seed).named_parameters()}


def expected_ids(daemon: Daemon, model: PreTrainedModel, seed: int) -> list[int]:
    """What the engine says with all weights of `seed`, pushed in place, the way that is proven elsewhere."""
    load_seed(model, seed)
    daemon.refit(model)
    return daemon.generate_one(PROMPT, GREEDY).token_ids.tolist()


@pytest.fixture
def other_ids(daemon: Daemon, model: PreTrainedModel) -> list[int]:
    """The greedy ids of weights B; the engine holds A when the test begins."""
    ids = expected_ids(daemon, model, 1)
    load_seed(model, 0)
    daemon.refit(model)
    return ids


@pytest.mark.parametrize("only", ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"])
def test_a_partial_update_changes_exactly_what_it_names(daemon: Daemon, model: PreTrainedModel, only: str) -> None:
    """Pushing one tensor moves the version and equals a full refit of the model with that one tensor changed."""
    load_seed(model, 0)
    daemon.refit(model)
    with torch.no_grad():
        model.get_parameter(only).copy_(random_model("qwen3", seed=1).get_parameter(only))
    partial = daemon.refit(model, only=[only])
    assert partial.partial
    assert partial.tensors == 1
    after_partial = daemon.generate_one(PROMPT, GREEDY)
    full = daemon.refit(model)
    after_full = daemon.generate_one(PROMPT, GREEDY)
    assert full.digest == partial.digest
    assert after_partial.token_ids.tolist() == after_full.token_ids.tolist()
    assert after_partial.logprobs.tolist() == after_full.logprobs.tolist()


def test_a_dropped_tensor_is_named_and_nothing_is_committed(daemon: Daemon) -> None:
    """A full refit without one norm weight is refused before any write, naming what is missing."""
    tensors = tensors_of(1)
    del tensors["model.layers.1.input_layernorm.weight"]
    with unharmed(daemon), pytest.raises(RefitdError) as refused:
        daemon.refit(tensors)
    assert refused.value.code is ErrorCode.MANIFEST_MISMATCH
    assert "model.layers.1.input_layernorm.weight" in str(refused.value.details["missing"])


def test_an_unexpected_tensor_is_named(daemon: Daemon) -> None:
    """A tensor the engine does not know is refused before any write."""
    with unharmed(daemon), pytest.raises(RefitdError) as refused:
        daemon.refit({**tensors_of(1), "model.layers.9.mlp.up_proj.weight": torch.zeros(4, 4)})
    assert refused.value.code is ErrorCode.MANIFEST_MISMATCH
    assert "model.layers.9.mlp.up_proj.weight" in str(refused.value.details["unexpected"])


def test_a_wrong_shape_is_refused(daemon: Daemon) -> None:
    """A tensor of another shape is refused before any write."""
    tensors = tensors_of(1)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    with unharmed(daemon), pytest.raises(RefitdError) as refused:
        daemon.refit(tensors)
    assert refused.value.code is ErrorCode.MANIFEST_MISMATCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_float_dtypes_are_cast_as_torch_casts(daemon: Daemon, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """An fp32, fp64 or fp16 trainer gets what `.to(engine dtype)` of its weights would give."""
    source = tensors_of(1, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source[name].to(torch.bfloat16))
    digest = daemon.refit(model).digest
    load_seed(model, 0)
    daemon.refit(model)
    assert daemon.refit(source).digest == digest


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_integer_weights_are_refused(daemon: Daemon, dtype: torch.dtype) -> None:
    """Weights that are no floats are refused before any write."""
    with unharmed(daemon), pytest.raises(RefitdError) as refused:
        daemon.refit(tensors_of(1, dtype))
    assert refused.value.code is ErrorCode.MANIFEST_MISMATCH


def test_order_never_matters(daemon: Daemon, other_ids: list[int]) -> None:
    """Tensors in random order, q, k and v far apart, give the same model."""
    tensors = list(tensors_of(1).items())
    random.Random(7).shuffle(tensors)
    daemon.refit(dict(tensors))
    assert daemon.generate_one(PROMPT, GREEDY).token_ids.tolist() == other_ids


def test_every_full_refit_is_right_not_only_the_first(daemon: Daemon, model: PreTrainedModel) -> None:
    """Three bucket refits in a row, each of other weights, equal three in-place refits."""
    for seed in (1, 2, 3):
        load_seed(model, seed)
        in_place = daemon.refit(model)
        daemon.refit(tensors_of(0))
        buckets = daemon.refit(tensors_of(seed))
        assert buckets.digest == in_place.digest
        assert daemon.generate_one(PROMPT, GREEDY).version == buckets.version


def test_the_version_must_rise(daemon: Daemon, model: PreTrainedModel) -> None:
    """A commit of a version that is served already, or older, is refused; a jump ahead is not."""
    served = daemon.status().version
    with unharmed(daemon), pytest.raises(RefitdError) as refused:
        daemon.refit(model, version=served)
    assert refused.value.code is ErrorCode.VERSION_NOT_INCREASING
    assert daemon.refit(model, version=served + 10).version == served + 10


def test_not_finite_weights_are_refused_where_asked(daemon: Daemon, model: PreTrainedModel) -> None:
    """With the finite check a NaN is refused before the first write, naming the tensor."""
    load_seed(model, 0)
    daemon.refit(model)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] = float("nan")
    with unharmed(daemon), pytest.raises(RefitdError) as refused:
        daemon.refit(model, check_finite=True)
    assert refused.value.code is ErrorCode.NOT_FINITE
    assert "model.layers.1.mlp.up_proj.weight" in str(refused.value)


def test_a_stream_of_tensors_is_refitted_by_its_specs(daemon: Daemon, other_ids: list[int]) -> None:
    """A generator that makes each tensor when asked for it works, given the shapes it will bring."""
    tensors = tensors_of(1)
    shapes = [TensorShape(name=name, dtype="bfloat16", shape=tuple(tensor.shape)) for name, tensor in tensors.items()]
    daemon.refit(iter(tensors.items()), specs=shapes)
    assert daemon.generate_one(PROMPT, GREEDY).token_ids.tolist() == other_ids
    assert daemon.status().state is EngineState.READY
