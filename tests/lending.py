"""What a trainer of this process lends to a daemon, for tests that speak for themselves."""

from __future__ import annotations

from transformers import PreTrainedModel

from refit_protocol.messages import OpenSource
from refit_protocol.tensors import MemfdSegment
from refit_trainer.sharing import SharedModule, shared_module


def exported(model: PreTrainedModel) -> SharedModule:
    shared = shared_module(model)
    assert shared is not None
    return shared


def lent(model: PreTrainedModel, epoch: int, bell: MemfdSegment | None = None) -> OpenSource:
    shared = exported(model)
    return OpenSource(epoch=epoch, kind="inplace", segments=shared.memory.segments, tensors=shared.tensors, bell=bell)
