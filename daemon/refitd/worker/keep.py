"""The last committed weights in host memory, copied there in the background, to be put back without the trainer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from enum import StrEnum

import torch

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.worker.boundary import Answer
from refitd.worker.copies import copy_on_this_thread

logger = logging.getLogger(__name__)


class KeepState(StrEnum):
    OFF = "off"
    SAVING = "saving"
    SAVED = "saved"
    FAILED = "failed"


class Keeper:
    """One copy of the weights, complete or not there at all.

    A save in progress is waited for before anybody writes the weights it reads, so what can be restored is always one
    whole committed version.
    """

    def __init__(self) -> None:
        self.state = KeepState.OFF
        self._saved: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._saved.values())

    def status(self) -> Answer:
        return {"state": self.state.value, "bytes": self.size_bytes}

    def save(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Starts to copy; the weights must not be written before `wait` returned."""
        self.wait(timeout_seconds=None)
        self.state = KeepState.SAVING
        self._thread = threading.Thread(target=self._copy, args=(dict(weights),), name="refit-keep", daemon=True)
        self._thread.start()

    def wait(self, timeout_seconds: float | None) -> None:
        """Until no save is in progress; raises `refit_failed` when that takes longer."""
        if self._thread is None:
            return
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            message = f"the last weights were not yet kept after {timeout_seconds:g} s; nothing was written"
            raise ProtocolError(ErrorCode.REFIT_FAILED, message)
        self._thread = None

    def restore(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Puts every byte back; raises `nothing_to_restore` before it writes."""
        if self.state is not KeepState.SAVED or self._saved.keys() != weights.keys():
            raise ProtocolError(
                ErrorCode.NOTHING_TO_RESTORE, f"no complete set of weights is kept ({self.state.value})"
            )
        with torch.no_grad():
            for name, kept in self._saved.items():
                weights[name].copy_(kept)

    def drop(self) -> None:
        """Frees the memory."""
        self.wait(timeout_seconds=None)
        self.state = KeepState.OFF
        self._saved.clear()

    def _copy(self, weights: Mapping[str, torch.Tensor]) -> None:
        try:
            self._saved = {name: _like(tensor, self._saved.get(name)) for name, tensor in weights.items()}
            for name, tensor in weights.items():
                copy_on_this_thread(self._saved[name], tensor)
        except Exception:
            # The boundary of this thread: it has nobody to tell but the next one who asks.
            logger.exception("the weights could not be kept")
            self.state = KeepState.FAILED
            self._saved.clear()
            return
        self.state = KeepState.SAVED


def _like(tensor: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
    """Host memory for the tensor, the same as last time where that fits."""
    if earlier is not None and earlier.shape == tensor.shape and earlier.dtype == tensor.dtype:
        return earlier
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
