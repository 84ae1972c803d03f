"""Commits from a trainer's own memory: what they refuse before a byte is written, and what is served afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from refit_protocol.digest import DigestMode
from refit_protocol.tensors import DType
from refit_trainer.digest import weights_digest
from tests.worker.conftest import SOURCE
from tests.worker.engines import LoadedWorker, differences
from tests.worker.models import Kind
from tests.worker.trainers import ExportedTensors

Weights = dict[str, torch.Tensor]
WeightsOf = Callable[[Kind, int], Weights]
NORM = "model.norm.weight"


@dataclass(frozen=True)
class Described:
    name: str
    dtype: DType
    optional: bool


def manifest(worker: LoadedWorker) -> list[Described]:
    described = worker.call("refitd_describe")["manifest"]
    return [Described(tensor["name"], DType(tensor["dtype"]), tensor["optional"]) for tensor in described]


def test_a_rehearsal_changes_nothing(opened: LoadedWorker, trainer: ExportedTensors) -> None:
    """Of a source that is there or has just gone; the commit behind it writes what it writes without."""
    before = opened.served()
    for source in (SOURCE, "gone"):
        opened.call("refitd_rehearse", source)
    assert differences(opened.served(), before) == []
    opened.call("refitd_commit", SOURCE)
    assert opened.call("refitd_digest", "full")["digest"] == weights_digest(
        trainer.tensors, manifest(opened), DigestMode.FULL
    )


# --- refused before anything is written -------------------------------------------------------------------------------


def test_not_finite_weights_are_refused_on_request(opened: LoadedWorker, trainer: ExportedTensors) -> None:
    """NaN, and what only becomes infinite in the engine's dtype, are found before the first write."""
    before = opened.served()
    trainer.tensors[NORM][5] = float("nan")
    code, details, wrote = opened.refused("refitd_commit", SOURCE, None, "sampled", True)
    assert (code, details["tensors"], wrote) == ("not_finite", [NORM], False)
    assert differences(opened.served(), before) == []


def test_unknown_names_in_a_partial_commit_are_refused(opened: LoadedWorker) -> None:
    code, details, wrote = opened.refused("refitd_commit", SOURCE, [NORM, "stranger"])
    assert (code, details["unexpected"], wrote) == ("manifest_mismatch", ["stranger"], False)


def test_a_tied_head_that_differs_is_refused(worker_of: Callable[[Kind], LoadedWorker], weights_of: WeightsOf) -> None:
    """Equal or left out; different or alone is an error."""
    worker, weights = worker_of("qwen3_tied"), dict(weights_of("qwen3_tied", 1))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    with ExportedTensors(weights) as trainer:
        worker.call("refitd_open_source", SOURCE, "inplace", *trainer.source)
        worker.call("refitd_commit", SOURCE)
        trainer.tensors["lm_head.weight"][1, 1] += 1
        code, details, wrote = worker.refused("refitd_commit", SOURCE)
        assert (code, details["different"], wrote) == ("manifest_mismatch", ["lm_head.weight"], False)
        _, details, _ = worker.refused("refitd_commit", SOURCE, ["lm_head.weight"])
        worker.call("refitd_close_all")
    assert details["missing"] == ["model.embed_tokens.weight"]
    del weights["model.embed_tokens.weight"]
    with ExportedTensors(weights) as trainer:
        _, details, _ = worker.refused("refitd_open_source", SOURCE, "inplace", *trainer.source)
    assert details["missing"] == ["model.embed_tokens.weight"]


# --- commits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_float_sources_equal_their_cast(worker: LoadedWorker, weights_of: WeightsOf, dtype: torch.dtype) -> None:
    """By the loader the first time, by the plan the second, both equal `.to(engine dtype)`."""
    noisy = {name: tensor.to(dtype) * 1.001 for name, tensor in weights_of("qwen3", 1).items()}
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in noisy.items()}
    with ExportedTensors(noisy) as trainer, ExportedTensors(cast) as plain:
        worker.call("refitd_open_source", "plain", "inplace", *plain.source)
        worker.call("refitd_commit", "plain")
        expected = worker.served()
        worker.call("refitd_open_source", SOURCE, "inplace", *trainer.source)
        for _ in range(2):
            worker.call("refitd_commit", SOURCE, None, "full")
            assert differences(worker.served(), expected) == []
        worker.call("refitd_close_all")


def test_transposed_sources_arrive_upright(
    worker: LoadedWorker, weights_of: WeightsOf, fresh: Callable[[Kind, int], Weights]
) -> None:
    """Strides are the trainer's affair: half of the matrices lie column by column."""
    weights = weights_of("qwen3", 1)
    matrices = [name for name, tensor in weights.items() if tensor.dim() == 2]
    with ExportedTensors(weights, transposed=matrices[::2]) as trainer:
        opened = worker.call("refitd_open_source", SOURCE, "inplace", *trainer.source, "require")
        assert opened["path"] == "plan"
        for seed in (0, 1):
            for name, tensor in weights_of("qwen3", seed).items():
                trainer.tensors[name].copy_(tensor)
            worker.call("refitd_commit", SOURCE, None, "full")
            assert differences(worker.served(), fresh("qwen3", seed)) == []
        worker.call("refitd_close_all")


def test_partial_commits_change_only_what_they_name(
    opened: LoadedWorker, trainer: ExportedTensors, fresh: Callable[[Kind, int], Weights], weights_of: WeightsOf
) -> None:
    """Only q_proj, then only lm_head, then everything: never a stale or a foreign element."""
    opened.call("refitd_commit", SOURCE)
    for name, tensor in weights_of("qwen3", 0).items():
        trainer.tensors[name].copy_(tensor)
    old, new = fresh("qwen3", 1), fresh("qwen3", 0)
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    committed = opened.call("refitd_commit", SOURCE, ["model.layers.0.self_attn.q_proj.weight"], "full")
    served = opened.served()
    assert committed["tensors"] == 1
    assert differences(served, old) == [fused]
    assert torch.equal(served[fused], torch.cat([new[fused][:128], old[fused][128:]]))
    opened.call("refitd_commit", SOURCE, ["lm_head.weight"], "full")
    assert differences(opened.served(), old) == [fused, "lm_head.weight"]
    opened.call("refitd_commit", SOURCE)
    assert differences(opened.served(), new) == []


def test_loader_path_gives_the_same_bytes(
    worker: LoadedWorker, trainer: ExportedTensors, fresh: Callable[[Kind, int], Weights]
) -> None:
    """With the plan off every commit goes through vLLM's loader, and says so."""
    worker.call("refitd_open_source", SOURCE, "inplace", *trainer.source, "off")
    for _ in range(2):
        committed = worker.call("refitd_commit", SOURCE)
        assert (committed["path"], len(committed["loader_tensors"])) == ("loader", len(trainer.tensors))
        assert differences(worker.served(), fresh("qwen3", 1)) == []
    name = "model.layers.0.self_attn.q_proj.weight"
    code, details, wrote = worker.refused("refitd_commit", SOURCE, [name])
    assert (code, wrote) == ("plan_required", False)
    assert set(details["absent"]) == {name.replace("q_proj", "k_proj"), name.replace("q_proj", "v_proj")}


def test_digest_is_the_trainers_own(opened: LoadedWorker, trainer: ExportedTensors) -> None:
    """Both sides get the same number from their own memory, in both modes, and another one after any change."""
    sampled = opened.call("refitd_commit", SOURCE)["digest"]
    assert sampled == weights_digest(trainer.tensors, manifest(opened), DigestMode.SAMPLED)
    full = opened.call("refitd_digest", "full")["digest"]
    assert full == weights_digest(trainer.tensors, manifest(opened), DigestMode.FULL)
    opened.model.get_parameter("model.layers.1.mlp.down_proj.weight").data[100, 200] += 1
    assert opened.call("refitd_digest", "full")["digest"] != full


@pytest.mark.parametrize("how", ["sampled", "full"])
def test_attest_notices_a_parameter_that_did_not_take_the_bytes(
    opened: LoadedWorker, trainer: ExportedTensors, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that silently did nothing fails the commit, which has then written."""
    opened.call("refitd_commit", SOURCE)
    trainer.tensors[NORM].add_(1)
    monkeypatch.setattr("refitd.worker.copies.CopyProgram.start", lambda _program: None)
    code, details, wrote = opened.refused("refitd_commit", SOURCE, None, how)
    assert (code, details["tensors"], wrote) == ("attest_failed", [NORM], True)
    assert opened.call("refitd_commit", SOURCE, None, "off")["digest"] is None


def test_a_failure_while_writing_says_so(opened: LoadedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon must know that the weights are torn; a later commit that succeeds clears that."""
    opened.call("refitd_commit", SOURCE)
    with monkeypatch.context() as patch:
        patch.setattr("refitd.worker.copies.CopyProgram.start", lambda _program: 1 / 0)
        code, details, wrote = opened.refused("refitd_commit", SOURCE)
    assert (code, wrote) == ("refit_failed", True)
    assert "ZeroDivisionError" in details["traceback"]
    assert opened.call("refitd_commit", SOURCE)["ok"]


# --- the plan's limits ------------------------------------------------------------------------------------------------


def doubled(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded * 2)


def doubled_when_real(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded if loaded.is_meta else loaded * 2)


@pytest.fixture
def strange_loader(worker: LoadedWorker) -> Iterator[Callable[[Callable[..., None]], None]]:
    """Gives the final norm another loader, and a plan that knows nothing of it yet; takes it away again."""
    norm = worker.model.get_submodule("model.norm")
    holders = [norm.weight, get_layerwise_info(norm).restore_metadata[0]["weight"]]

    def install(loader: Callable[..., None]) -> None:
        for holder in holders:
            holder.weight_loader = loader
        worker.worker.refitd_kept_state = None

    yield install
    worker.call("refitd_close_all")
    for holder in holders:
        del holder.weight_loader
    worker.worker.refitd_kept_state = None


def test_computed_parameters_go_through_the_loader(
    strange_loader: Callable[[Callable[..., None]], None],
    worker: LoadedWorker,
    trainer: ExportedTensors,
    weights_of: WeightsOf,
) -> None:
    """What the loader computes is no copy: that tensor takes the loader at every commit, and the answer says why."""
    strange_loader(doubled)
    assert worker.refused("refitd_open_source", SOURCE, "inplace", *trainer.source, "require")[0] == "plan_required"
    opened = worker.call("refitd_open_source", SOURCE, "inplace", *trainer.source)
    assert [tensor["name"] for tensor in opened["loader_tensors"]] == [NORM]
    assert "computes" in opened["loader_tensors"][0]["why"]
    for seed in (1, 0):
        for name, tensor in weights_of("qwen3", seed).items():
            trainer.tensors[name].copy_(tensor)
        assert worker.call("refitd_commit", SOURCE)["path"] == "mixed"
        assert torch.equal(worker.model.get_parameter(NORM), weights_of("qwen3", seed)[NORM] * 2)


def test_a_plan_that_disagrees_with_the_loader_is_given_up(
    strange_loader: Callable[[Callable[..., None]], None],
    worker: LoadedWorker,
    trainer: ExportedTensors,
    weights_of: WeightsOf,
) -> None:
    """A trace that looks like a plain copy but is none is found at the first commit, whose result is the loader's."""
    strange_loader(doubled_when_real)
    assert worker.call("refitd_open_source", SOURCE, "inplace", *trainer.source)["path"] == "plan"
    for seed in (1, 0):
        for name, tensor in weights_of("qwen3", seed).items():
            trainer.tensors[name].copy_(tensor)
        committed = worker.call("refitd_commit", SOURCE)
        assert [tensor["name"] for tensor in committed["loader_tensors"]] == [NORM]
        assert torch.equal(worker.model.get_parameter(NORM), weights_of("qwen3", seed)[NORM] * 2)


def test_a_partial_commit_proves_the_plan_too(
    strange_loader: Callable[[Callable[..., None]], None], worker: LoadedWorker, trainer: ExportedTensors
) -> None:
    """Without all tensors at hand the loader reloads what the plan wrote; a difference fails the refit."""
    strange_loader(doubled_when_real)
    worker.call("refitd_open_source", SOURCE, "inplace", *trainer.source)
    code, details, wrote = worker.refused("refitd_commit", SOURCE, ["lm_head.weight"])
    assert (code, details["parameters"], wrote) == ("refit_failed", [NORM], True)
    assert worker.call("refitd_commit", SOURCE)["path"] == "mixed"


def test_parameters_that_moved_are_found_again(
    opened: LoadedWorker, trainer: ExportedTensors, fresh: Callable[[Kind, int], Weights]
) -> None:
    """After another part of the engine gave a parameter new memory, commits go there."""
    opened.call("refitd_commit", SOURCE)
    parameter = opened.model.get_parameter("model.embed_tokens.weight")
    parameter.data = torch.zeros_like(parameter)
    opened.call("refitd_commit", SOURCE, None, "full")
    assert differences(opened.served(), fresh("qwen3", 1)) == []
