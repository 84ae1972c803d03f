"""How trainer memory is exported, by the kind of device it lies on. No torch here: a backend brings its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from refit_protocol.tensors import MemfdSegment, Segment
from refit_trainer.early_commit import ReleaseWord
from refit_trainer.errors import NotShareable

if TYPE_CHECKING:
    import torch


class Bell(Protocol):
    """Shared memory in which this process starts copies that wait for it: see `refit_protocol.bell`."""

    @property
    def segment(self) -> MemfdSegment: ...

    @property
    def release(self) -> ReleaseWord:
        """By which a commit goes on that was sent before this process has looked at its memory."""

    def make_ready(self) -> None:
        """Whatever takes its time, before `ring` is called on the same thread."""

    def ring(self, number: int, workers: int) -> None:
        """As soon as all that the calling thread has enqueued is done, in the words of the first `workers`; not at all
        where that cannot be arranged."""

    def ring_awaited(self) -> bool:
        """`ring` for the refit that stands by, if one does."""

    def await_ringing(self) -> None:
        """Returns when what the calling thread had enqueued before `ring` is done."""

    def arrived(self, number: int, workers: int) -> bool:
        """Whether all these workers hold what they were rung for."""


class ExportedMemory(Protocol):
    """Memory that a daemon on this machine can open by its descriptors, as long as it is not closed."""

    @property
    def segments(self) -> list[Segment]: ...

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The number of the segment that holds the tensor and its offset there in bytes; None if none does."""

    def is_in_place(self) -> bool:
        """Whether what lies at its addresses is still the memory that was exported. Called before every refit."""

    def synchronise(self, segment: int | None = None) -> None:
        """Called before a daemon is told to read one segment, or all: what the calling thread has enqueued to write it
        must be seen by the daemon."""

    def bell(self) -> Bell | None:
        """A new one, for one daemon; None where copies from such memory wait for none."""

    def close(self) -> None:
        """Gives the memory up; tensors in it stay valid until they are gone themselves."""


class Buckets(ExportedMemory, Protocol):
    """Staging memory of one size, as flat uint8 tensors; bucket i is segment i."""

    @property
    def views(self) -> Sequence[torch.Tensor]: ...


class Backend(Protocol):
    def share(self, tensors: Sequence[torch.Tensor]) -> ExportedMemory:
        """Exports these tensors' memory, after moving it where it has to be: each tensor's `data` then lies there."""

    def buckets(self, count: int, size_bytes: int, device: torch.device) -> Buckets: ...


def _memfd() -> Backend:
    from refit_trainer.memory import MemfdBackend

    return MemfdBackend()


def _cuda_ipc() -> Backend:
    from refit_trainer.cuda_memory import CudaBackend

    return CudaBackend()


_BACKENDS: dict[str, Callable[[], Backend]] = {"cpu": _memfd, "cuda": _cuda_ipc}


def register_backend(device_type: str, backend: Callable[[], Backend]) -> None:
    """`device_type` as in `torch.device.type`; `backend` is called when tensors on such a device are first met."""
    _BACKENDS[device_type] = backend


def backend_for(device_type: str) -> Backend:
    """Raises `NotShareable` where there is none."""
    backend = _BACKENDS.get(device_type)
    if backend is None:
        raise NotShareable(f"tensors on {device_type} cannot be exported, only those on {', '.join(sorted(_BACKENDS))}")
    return backend()
