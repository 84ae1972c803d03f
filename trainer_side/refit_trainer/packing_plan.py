"""Packing of tensors that a mapping holds from one refit to the next: what goes where is settled once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from refit_protocol.tensors import ITEM_BYTES, BucketPiece, TensorShape
from refit_trainer.packing import FilledBucket, Places, Placing, copy_piece, fill_bytes


class Run(NamedTuple):
    """`size_bytes` of tensor number `tensor`, from `offset_bytes` on, that go to the address `target`."""

    tensor: int
    offset_bytes: int
    target: int
    size_bytes: int


_Kind: TypeAlias = tuple[type, torch.device, bool]
"""What is to be known of a tensor besides its address; the third: whether it is contiguous. One is made of each tensor
at every refit, and anything but a plain tuple takes five times as long."""


class RunCopies(Protocol):
    """Copies of bytes by address, grouped by the bucket that they fill."""

    def aim(self, addresses: Sequence[int]) -> None:
        """Where each tensor lies now; to be called before the first copy, and when that has changed."""

    def copy(self, turn: int) -> None:
        """All runs of the bucket that is packed in this turn; on a GPU enqueued on the current stream."""


class PackingPlan:
    """The pieces of every bucket for tensors of these `shapes`, in this order, and how they get there.

    Pieces of plain contiguous tensors are copied by address, all others like an iterator's. `parts` are the tensors of
    each bucket.
    """

    def __init__(self, shapes: Sequence[TensorShape], places: Places, max_pieces: int) -> None:
        self._shapes = list(shapes)
        self._max_pieces = max_pieces
        self._places = places
        self._filled, self._pieces = _placed(shapes, places.buckets, max_pieces)
        self._unit_bytes = _unit_bytes(places.buckets[0].device)
        self.parts = [slice(pieces[0][0], pieces[-1][0] + 1) for pieces in self._pieces]
        self._kinds: list[_Kind] = []
        self._plain: list[bool] = []
        self._addresses: list[int] = []
        self._by_address: list[bool] = []
        self._copies: RunCopies = MemoryCopies([])
        self._others: list[list[tuple[int, BucketPiece]]] = []

    @property
    def ahead(self) -> int:
        """How many buckets may be packed before the first is read: all, where packing is only enqueued; else it is
        to go on while the first is read."""
        buckets = self._places.buckets
        return len(buckets) if buckets[0].is_cuda else 1

    def is_for(self, shapes: Sequence[TensorShape], max_pieces: int) -> bool:
        return self._shapes == shapes and self._max_pieces == max_pieces

    def pack(self, tensors: Sequence[torch.Tensor]) -> Iterator[FilledBucket]:
        """Yields what `packing.pack` would, for tensors of these shapes. Nobody may change what is given meanwhile."""
        for turn, filled in enumerate(self._filled):
            self._look_at(tensors, self.parts[turn])
            self._copies.copy(turn)
            for number, piece in self._others[turn]:
                copy_piece(tensors[number].detach(), piece, self._places, filled.bucket)
            yield filled

    def _look_at(self, tensors: Sequence[torch.Tensor], part: slice) -> None:
        """At those of one bucket, so that the first one is soon packed; at all where one is not what it was."""
        kinds = [_kind_of(tensor) for tensor in tensors[part]]
        if kinds != self._kinds[part]:
            self._look_at_all(tensors)
        elif _addresses(tensors[part], self._plain[part]) != self._addresses[part]:
            self._aim(_addresses(tensors, self._plain))

    def _look_at_all(self, tensors: Sequence[torch.Tensor]) -> None:
        device = self._places.buckets[0].device
        self._kinds = [_kind_of(tensor) for tensor in tensors]
        self._plain = [_is_plain(kind, device) for kind in self._kinds]
        self._aim(_addresses(tensors, self._plain))

    def _aim(self, addresses: list[int]) -> None:
        by_address = [
            plain and address % self._unit_bytes == 0 for plain, address in zip(self._plain, addresses, strict=True)
        ]
        # Unknown meanwhile, for an interrupt may come here.
        self._addresses = []
        if by_address != self._by_address:
            self._by_address = []
            self._divide(by_address)
            self._by_address = by_address
        self._copies.aim(addresses)
        self._addresses = addresses

    def _divide(self, by_address: Sequence[bool]) -> None:
        """Into pieces that are copied by address and others."""
        runs: list[list[Run]] = []
        self._others = []
        for filled, pieces in zip(self._filled, self._pieces, strict=True):
            runs.append([])
            self._others.append([])
            for number, piece in pieces:
                run = self._run(number, piece, filled.bucket)
                if by_address[number] and _is_exact(run, self._unit_bytes):
                    runs[-1].append(run)
                else:
                    self._others[-1].append((number, piece))
        self._copies = _copies(runs, self._places.buckets[0].device)

    def _run(self, number: int, piece: BucketPiece, bucket: int) -> Run:
        item_bytes = ITEM_BYTES[self._shapes[number].dtype]
        target = self._places.buckets[bucket].data_ptr() + piece.offset_bytes
        return Run(number, piece.first * item_bytes, target, piece.count * item_bytes)


class MemoryCopies:
    """On the CPU, by the calling thread alone."""

    def __init__(self, runs: Sequence[Sequence[Run]]) -> None:
        self._runs = runs
        self._addresses: Sequence[int] = []

    def aim(self, addresses: Sequence[int]) -> None:
        self._addresses = addresses

    def copy(self, turn: int) -> None:
        addresses = self._addresses
        for tensor, offset_bytes, target, size_bytes in self._runs[turn]:
            ctypes.memmove(target, addresses[tensor] + offset_bytes, size_bytes)


_Numbered = list[tuple[int, BucketPiece]]


def _placed(
    shapes: Sequence[TensorShape], buckets: Sequence[torch.Tensor], max_pieces: int
) -> tuple[list[FilledBucket], list[_Numbered]]:
    """The buckets in the order in which they are filled, and for each its pieces with the numbers of their tensors."""
    placing = Placing(len(buckets), fill_bytes(shapes, buckets[0].numel(), len(buckets)), max_pieces)
    filled = [placing.filled]
    pieces: list[_Numbered] = [[]]
    for number, shape in enumerate(shapes):
        for following, piece in placing.of(shape):
            if following is not filled[-1]:
                filled.append(following)
                pieces.append([])
            pieces[-1].append((number, piece))
    filled[-1].is_last = True
    return filled, pieces


def _unit_bytes(device: torch.device) -> int:
    """What addresses and sizes have to be multiples of."""
    if device.type != "cuda":
        return 1
    # Imported only where buckets lie on a GPU.
    from refit_trainer.cuda_packing import VECTOR_BYTES

    return VECTOR_BYTES


def _copies(runs: Sequence[Sequence[Run]], device: torch.device) -> RunCopies:
    if device.type != "cuda":
        return MemoryCopies(runs)
    from refit_trainer.cuda_packing import DeviceCopies

    return DeviceCopies(runs, device)


def _kind_of(tensor: torch.Tensor) -> _Kind:
    return type(tensor), tensor.device, tensor.is_contiguous()


def _addresses(tensors: Sequence[torch.Tensor], plain: Sequence[bool]) -> list[int]:
    return [tensor.data_ptr() if at_address else 0 for tensor, at_address in zip(tensors, plain, strict=True)]


def _is_plain(kind: _Kind, bucket: torch.device) -> bool:
    """Whether what lies at the tensor's address is the tensor, in row-major order, within reach of the copies."""
    made_of, device, contiguous = kind
    dispatches = getattr(made_of, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__
    return contiguous and device == bucket and not dispatches and _copies_by_address(bucket)


def _copies_by_address(device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type == "cpu"
    from refit_trainer.cuda_packing import has_kernel

    return has_kernel(device)


def _is_exact(run: Run, unit_bytes: int) -> bool:
    return not (run.offset_bytes % unit_bytes or run.target % unit_bytes or run.size_bytes % unit_bytes)
