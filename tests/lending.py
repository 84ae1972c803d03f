"""What a trainer of this process lends to a daemon, for tests that speak for themselves."""

from __future__ import annotations

from transformers import PreTrainedModel

from refit_protocol.bell import BELL_BYTES
from refit_protocol.messages import OpenSource
from refit_protocol.tensors import MemfdSegment
from refit_trainer.early_commit import ReleaseWord
from refit_trainer.memory import Memfd
from refit_trainer.sharing import SharedModule, shared_module


class HostBell:
    """Of memory on a CPU, which has none by itself: commits are released by it, and nothing waits to be rung for."""

    def __init__(self) -> None:
        self.memfd = Memfd("bell", BELL_BYTES)
        self.release = ReleaseWord(self.memfd.view.numpy())

    @property
    def segment(self) -> MemfdSegment:
        return self.memfd.segment

    def make_ready(self) -> None: ...

    def ring(self, _number: int, _workers: int) -> None:
        raise AssertionError("no copies wait on a CPU")

    def await_ringing(self) -> None: ...

    def arrived(self, _number: int, _workers: int) -> bool:
        return False


def exported(model: PreTrainedModel) -> SharedModule:
    shared = shared_module(model)
    assert shared is not None
    return shared


def lent(model: PreTrainedModel, epoch: int, bell: MemfdSegment | None = None) -> OpenSource:
    shared = exported(model)
    return OpenSource(epoch=epoch, kind="inplace", segments=shared.memory.segments, tensors=shared.tensors, bell=bell)
