"""What is opened: nothing that the engine could not take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.worker.conftest import SOURCE
from tests.worker.engines import LoadedWorker
from tests.worker.models import Kind
from tests.worker.trainers import ExportedTensors

Weights = dict[str, torch.Tensor]
WeightsOf = Callable[[Kind, int], Weights]
NORM = "model.norm.weight"


def test_a_dropped_norm_is_missing(worker: LoadedWorker, weights_of: WeightsOf) -> None:
    """One tensor left out is named, and nothing is opened."""
    weights = {name: tensor for name, tensor in weights_of("qwen3", 1).items() if name != NORM}
    with ExportedTensors(weights) as trainer:
        code, details, wrote = worker.refused("refitd_open_source", SOURCE, "inplace", *trainer.source)
    assert (code, details["missing"], wrote) == ("manifest_mismatch", [NORM], False)
    assert worker.refused("refitd_commit", SOURCE)[0] == "unknown_source"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.bool])
def test_integers_are_no_weights(worker: LoadedWorker, weights_of: WeightsOf, dtype: torch.dtype) -> None:
    with ExportedTensors({name: tensor.to(dtype) for name, tensor in weights_of("qwen3", 1).items()}) as trainer:
        code, details, _ = worker.refused("refitd_open_source", SOURCE, "inplace", *trainer.source)
    assert code == "manifest_mismatch"
    assert len(details["dtype"]) == len(trainer.tensors)


def test_a_wrong_shape_is_named_beside_the_right_one(worker: LoadedWorker, weights_of: WeightsOf) -> None:
    """So is a dtype; of many the first few."""
    weights = weights_of("qwen3", 1)
    size = weights[NORM].numel()
    weights[NORM] = torch.ones(size // 2, 2, dtype=torch.bfloat16)
    with ExportedTensors(weights) as trainer:
        answer = worker.answer("refitd_open_source", SOURCE, "inplace", *trainer.source)
    message = answer["error"]["message"]
    assert message.endswith(f"1 shape ({NORM} is [{size // 2}, 2] instead of [{size}])")
    with ExportedTensors({name: tensor.to(torch.int8) for name, tensor in weights_of("qwen3", 1).items()}) as trainer:
        answer = worker.answer("refitd_open_source", SOURCE, "inplace", *trainer.source)
    assert answer["error"]["message"].count("is int8 instead of bfloat16") == 3


def test_one_prefix_too_many_is_named(worker: LoadedWorker, weights_of: WeightsOf) -> None:
    """A wrapper's module, whose names all begin with the attribute that it keeps the model in."""
    with ExportedTensors({f"policy.{name}": tensor for name, tensor in weights_of("qwen3", 1).items()}) as trainer:
        answer = worker.answer("refitd_open_source", SOURCE, "inplace", *trainer.source)
    assert answer["error"]["message"].endswith("pass the module inside, model.policy")
