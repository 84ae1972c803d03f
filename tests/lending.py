"""What a trainer of this process lends to a daemon, for tests that speak for themselves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from refit_protocol.bell import BELL_BYTES, DONE_OFFSET_BYTES, WORD_STRIDE_BYTES
from refit_protocol.messages import OpenSource
from refit_protocol.tensors import MemfdSegment
from refit_trainer.early_commit import ReleaseWord
from refit_trainer.memory import Memfd
from refit_trainer.sharing import SharedModule, shared_module


class HostBell:
    """Of memory on a CPU, which has none by itself: commits are released by it, and nothing waits to be rung for.
    `rung` is how often it was rung for what might stand by."""

    def __init__(self) -> None:
        self.memfd = Memfd("bell", BELL_BYTES)
        self.release = ReleaseWord(self.memfd.view.numpy())
        self.rung = 0

    @property
    def segment(self) -> MemfdSegment:
        return self.memfd.segment

    def make_ready(self) -> None: ...

    def ring(self, _number: int, _workers: int) -> None:
        raise AssertionError("no copies wait on a CPU")

    def ring_awaited(self) -> bool:
        self.rung += 1
        return True

    def done(self, worker: int = 0) -> int:
        """What the worker has told to be done."""
        return int(self._done_word(worker)[0])

    def tell_done(self, number: int, worker: int = 0) -> None:
        """As the worker would."""
        self._done_word(worker)[0] = number

    def _done_word(self, worker: int) -> NDArray[np.uint32]:
        begin = worker * WORD_STRIDE_BYTES + DONE_OFFSET_BYTES
        return self.memfd.view.numpy()[begin : begin + 4].view("<u4")

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
