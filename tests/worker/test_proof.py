"""The proof by reload on real vLLM models: what it must find, in which memory it works, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.worker import weights as weights_module
from refitd.worker.boxes import Box, Transfer
from refitd.worker.plan import Route
from refitd.worker.proof import prove_by_reload
from refitd.worker.weights import EngineWeights
from tests.worker.engines import LoadedWorker, differences
from tests.worker.models import Kind, build_model

GATE, UP = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"
Q_BIAS, K_BIAS, V_BIAS = (f"model.layers.1.self_attn.{name}_proj.bias" for name in "qkv")
QKV_BIAS = "model.layers.1.self_attn.qkv_proj.bias"
NORM = "model.norm.weight"


@pytest.fixture
def engine(worker: LoadedWorker) -> Iterator[LoadedWorker]:
    """The untied Qwen3 with a plan of its own, which the tests may spoil."""
    worker.worker.refitd_kept_state = None
    yield worker
    worker.worker.refitd_kept_state = None


@pytest.fixture
def biased(
    worker_of: Callable[[Kind], LoadedWorker], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoadedWorker]:
    """A Llama with biases, which vLLM loads in place; they are random here."""
    worker_of("qwen3")
    loaded = LoadedWorker(build_model("llama", tmp_path_factory.mktemp("biased"), seed=0, attention_bias=True))
    for name, parameter in loaded.model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    yield loaded
    loaded.close()


def weights_of_engine(worker: LoadedWorker) -> EngineWeights:
    worker.call("refitd_describe")
    weights: EngineWeights = worker.worker.refitd_kept_state.weights
    return weights


def swapped(weights: EngineWeights, one: str, other: str) -> None:
    """Makes the plan put two tensors of the same shape in each other's place."""
    routes = dict(weights.plan.routes)
    routes[one], routes[other] = (
        tuple(replace(route, tensor=name) for route in weights.plan.routes[source])
        for name, source in ((one, other), (other, one))
    )
    weights.plan = replace(weights.plan, routes=routes)


def wrong_parameters(weights: EngineWeights) -> list[str]:
    with pytest.raises(ProtocolError) as raised:
        prove_by_reload(weights)
    assert raised.value.code is ErrorCode.REFIT_FAILED
    found: list[str] = raised.value.details["parameters"]
    return found


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied", "qwen3_moe", "mixtral"])
def test_the_loader_is_given_the_engines_own_memory(
    kind: Kind, worker_of: Callable[[Kind], LoadedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one tensor is copied for it, and it arrives at what was there."""
    worker = worker_of(kind)
    weights, before = weights_of_engine(worker), worker.served()
    own = {parameter.untyped_storage().data_ptr() for parameter in worker.model.parameters()}
    given: list[bool] = []
    through_vllm = weights_module.reload

    def watched(runner: Any, config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        def looked_at() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                given.append(tensor.untyped_storage().data_ptr() in own)
                yield name, tensor

        through_vllm(runner, config, looked_at())

    monkeypatch.setattr(weights_module, "reload", watched)
    prove_by_reload(weights)
    weights.after_write()
    assert weights.proven_plan is weights.plan
    assert given == [True] * len(weights.plan.routes)
    assert differences(worker.served(), before) == []


def test_tensors_come_module_by_module(engine: LoadedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the checkpoint scatters them: the loader holds what it has of a module until it has all of it."""
    weights = weights_of_engine(engine)
    scattered = dict(sorted(weights.plan.routes.items(), key=lambda item: item[0].rpartition("layers")[2][2:]))
    weights.plan = replace(weights.plan, routes=scattered)
    names: list[str] = []
    monkeypatch.setattr(weights, "load", lambda tensors: names.extend(name for name, _ in tensors))
    wrong_parameters(weights)
    modules = [scattered[name][0].module for name in names]
    assert len(names) == len(scattered)
    assert sum(one != other for one, other in pairwise(modules)) == len(set(modules)) - 1


def test_swapped_tensors_are_found(engine: LoadedWorker) -> None:
    """The error names the parameter, its module takes the loader from then on, and the engine holds what that wrote."""
    weights = weights_of_engine(engine)
    before = engine.served()
    swapped(weights, GATE, UP)
    assert wrong_parameters(weights) == [GATE_UP]
    assert set(weights.plan.loader_only) == {GATE, UP}
    after = engine.served()
    assert differences(after, before) == [GATE_UP]
    first, second = before[GATE_UP].chunk(2)
    assert torch.equal(after[GATE_UP], torch.cat([second, first]))
    prove_by_reload(weights)


def test_what_is_loaded_in_place_is_proven_too(biased: LoadedWorker) -> None:
    """vLLM writes a bias as its parts come: they are read before that, and a wrong part is found all the same."""
    weights = weights_of_engine(biased)
    before = biased.served()
    prove_by_reload(weights)
    assert differences(biased.served(), before) == []
    swapped(weights, K_BIAS, V_BIAS)
    assert wrong_parameters(weights) == [QKV_BIAS]
    q, k, v = before[QKV_BIAS].split([128, 64, 64])
    assert torch.equal(biased.served()[QKV_BIAS], torch.cat([q, v, k]))


def test_a_model_that_is_wrapped_for_adapters_is_proven_too(
    worker_of: Callable[[Kind], LoadedWorker], checkpoint: Callable[[Kind, int], Path]
) -> None:
    """The loader sees other names than the plan has."""
    worker_of("qwen3")
    wrapped = LoadedWorker(checkpoint("qwen3", 0), enable_lora=True)
    weights = weights_of_engine(wrapped)
    assert any(".base_layer." in name for name in weights.plan.parameters)
    prove_by_reload(weights)
    swapped(weights, GATE, UP)
    assert wrong_parameters(weights) == [GATE_UP.replace(".weight", ".base_layer.weight")]
    wrapped.close()


def test_elements_of_other_ranks_do_not_pass_for_zeros(engine: LoadedWorker) -> None:
    """A plan that takes half of a tensor while the loader takes all of it: found although the engine holds zeros."""
    weights = weights_of_engine(engine)
    weights.flat(GATE_UP).zero_()
    [whole] = weights.plan.routes[GATE]
    half = whole.transfer.elements // 2
    offsets = whole.transfer.source.offset, whole.transfer.target.offset
    source, target = (Box(offset, (half,), (1,)) for offset in offsets)
    route = Route(GATE, GATE_UP, Transfer(source, target))
    weights.plan = replace(weights.plan, routes={**weights.plan.routes, GATE: (route,)})
    assert wrong_parameters(weights) == [GATE_UP]


def test_a_parameter_that_the_loader_leaves_alone_is_not_proven(
    engine: LoadedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds the right bytes only because nobody wrote it has been compared with nothing."""
    weights = weights_of_engine(engine)
    load = weights.load
    monkeypatch.setattr(weights, "load", lambda tensors: load(pair for pair in tensors if pair[0] != NORM))
    assert wrong_parameters(weights) == [NORM]
    assert "does not write it" in weights.plan.loader_only[NORM]


def test_the_engine_serves_after_a_failure(
    engine: LoadedWorker, checkpoint: Callable[[Kind, int], Path], fresh: Callable[[Kind, int], dict[str, torch.Tensor]]
) -> None:
    """A full refit mends it, and goes through the loader where the plan was wrong."""
    weights = weights_of_engine(engine)
    swapped(weights, GATE, UP)
    wrong_parameters(weights)
    reloaded = engine.call("refitd_reload", str(checkpoint("qwen3", 1)))
    assert reloaded["path"] == "mixed"
    assert differences(engine.served(), fresh("qwen3", 1)) == []
