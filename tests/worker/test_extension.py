"""The calls the daemon makes, and what they say: of the engine, of failures, of what is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from refitd.worker import keep
from refitd.worker.keep import Keeper, KeepState
from tests.worker.conftest import SOURCE
from tests.worker.engines import LoadedWorker, differences
from tests.worker.models import Kind
from tests.worker.trainers import ExportedTensors

Weights = dict[str, torch.Tensor]
WeightsOf = Callable[[Kind, int], Weights]


# --- what the engine expects ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "alias"), [("qwen3", None), ("qwen3_tied", "model.embed_tokens.weight"), ("qwen3_moe", None)]
)
def test_manifest_lists_the_checkpoint(
    kind: Kind, alias: str | None, worker_of: Callable[[Kind], LoadedWorker], weights_of: WeightsOf
) -> None:
    """Every tensor of the checkpoint is required, under its own name; a tied head is an optional alias."""
    tensors = {tensor["name"]: tensor for tensor in worker_of(kind).call("refitd_describe")["manifest"]}
    required = {name: tuple(tensor["shape"]) for name, tensor in tensors.items() if not tensor["optional"]}
    assert required == {name: tuple(tensor.shape) for name, tensor in weights_of(kind, 0).items()}
    optional = {name: tensor["alias_of"] for name, tensor in tensors.items() if tensor["optional"]}
    assert optional == ({} if alias is None else {"lm_head.weight": alias})


def test_manifest_of_an_architecture_is_that_of_its_checkpoint(weights_of: WeightsOf) -> None:
    """Without a checkpoint the names come from transformers, whose fused experts are taken apart as it saves them."""
    from refitd.worker.manifest import architecture_shapes
    from tests.worker.models import config

    shapes = architecture_shapes(config("qwen3_moe"))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in weights_of("qwen3_moe", 0).items()}


# --- failures ---------------------------------------------------------------------------------------------------------


def test_whatever_goes_wrong_is_an_answer(worker: LoadedWorker) -> None:
    """An exception would leave vLLM's replies out of step for ever."""
    code, details, wrote = worker.refused("refitd_open_source", SOURCE, "inplace", "nonsense", [])
    assert (code, wrote) == ("internal", False) or code == "manifest_mismatch"
    code, details, wrote = worker.refused("refitd_digest", "no such mode")
    assert (code, wrote) == ("internal", False)
    assert "Traceback" in details["traceback"]


# --- kept weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen3_moe"])
def test_restore_puts_back_what_was_kept(
    kind: Kind, worker_of: Callable[[Kind], LoadedWorker], weights_of: WeightsOf
) -> None:
    """Bit for bit, the packed experts included, whether the weights came by loading or by a commit."""
    worker = worker_of(kind)
    kept, digest = worker.served(), worker.call("refitd_digest")["digest"]
    worker.call("refitd_keep_last", "host")
    with ExportedTensors({name: tensor + 1 for name, tensor in weights_of(kind, 1).items()}) as trainer:
        worker.call("refitd_open_source", SOURCE, "inplace", *trainer.source)
        worker.call("refitd_commit", SOURCE)
        assert differences(worker.served(), kept) != []
        assert worker.call("refitd_restore")["digest"] == digest
        assert differences(worker.served(), kept) == []
        worker.call("refitd_close_all")
    worker.call("refitd_keep_last", "none")
    assert worker.refused("refitd_restore")[0] == "nothing_to_restore"


def test_falling_asleep_waits_for_the_copy_that_is_being_kept(
    opened: LoadedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights' memory is taken away then: what is kept has to be complete, and not be read in the meantime."""
    waited_for = threading.Event()
    wait = Keeper.wait

    def copy(_target: torch.Tensor, _weights: torch.Tensor) -> None:
        assert waited_for.wait(60)

    def noted(keeper: Keeper, timeout_seconds: float | None) -> None:
        if keeper.state is KeepState.SAVING:
            waited_for.set()
        wait(keeper, timeout_seconds)

    monkeypatch.setattr(keep, "copy_on_this_thread", copy)
    monkeypatch.setattr(Keeper, "wait", noted)
    try:
        opened.call("refitd_keep_last", "host")
        opened.call("refitd_before_sleep")
        assert opened.call("refitd_keep_status")["state"] == "saved"
    finally:
        waited_for.set()
        opened.call("refitd_keep_last", "none")
