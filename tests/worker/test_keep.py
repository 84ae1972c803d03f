"""Kept weights are one whole version, or none."""

from __future__ import annotations

import pytest
import torch

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.worker.keep import Keeper, KeepState


def test_restores_every_byte_of_the_last_save() -> None:
    """Later writes are undone, however many saves came before."""
    keeper = Keeper()
    weights = {"a": torch.randn(100, 30, dtype=torch.bfloat16), "b": torch.randn(7)}
    for _ in range(3):
        weights["a"].add_(1)
        keeper.save(weights)
        keeper.wait(10)
    kept = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in weights.values():
        tensor.fill_(float("nan"))
    keeper.restore(weights)
    assert all(torch.equal(weights[name], kept[name]) for name in kept)
    assert keeper.size_bytes == sum(tensor.nbytes for tensor in kept.values())


def test_nothing_is_restored_before_a_save() -> None:
    with pytest.raises(ProtocolError) as caught:
        Keeper().restore({"a": torch.zeros(1)})
    assert caught.value.code is ErrorCode.NOTHING_TO_RESTORE


def test_dropping_frees_the_memory() -> None:
    keeper = Keeper()
    keeper.save({"a": torch.zeros(10)})
    keeper.drop()
    assert (keeper.state, keeper.size_bytes) == (KeepState.OFF, 0)


def test_a_save_that_fails_leaves_nothing_to_restore() -> None:
    """A weight that cannot be read (here: it has no memory) must not leave half a version behind."""
    keeper = Keeper()
    keeper.save({"a": torch.zeros(10), "b": torch.zeros(10, device="meta")})
    keeper.wait(10)
    assert keeper.state is KeepState.FAILED
    with pytest.raises(ProtocolError):
        keeper.restore({"a": torch.zeros(10), "b": torch.zeros(10)})
