"""Bucket refits: tensors arrive in pieces, in any order, cut anywhere."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import BucketPiece, DType, TensorShape
from refitd.worker.attest import check_same
from refitd.worker.boxes import Transfer
from refitd.worker.copies import Copy, view_of, wait_for_stream
from refitd.worker.plan import Plan
from refitd.worker.programs import Program, copy_program
from refitd.worker.release import Release
from refitd.worker.sources import PLAN_OFF
from refitd.worker.weights import EngineWeights, torch_dtype

MAX_LAYOUTS = 4096

Pieces: TypeAlias = tuple[BucketPiece, ...]


class Buckets(Protocol):
    """The memory that pieces come in: a trainer's, or our own that is filled from a file."""

    def typed(self, segment: int, dtype: DType) -> torch.Tensor: ...

    def turns_until_written(self, segment: int) -> Iterator[None]: ...

    def close(self) -> None: ...


class Coverage:
    """Which elements of a tensor have come: disjoint, sorted ranges."""

    def __init__(self, tensor: TensorShape) -> None:
        self._tensor = tensor
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def received(self) -> int:
        return sum(self._ends) - sum(self._starts)

    @property
    def is_complete(self) -> bool:
        return self.received == self._tensor.elements

    def add(self, first: int, count: int) -> None:
        """Raises `invalid_descriptor` if any of the elements has come before."""
        end = first + count
        at = bisect_left(self._ends, first + 1)
        if at < len(self._starts) and self._starts[at] < end:
            raise ProtocolError(
                ErrorCode.INVALID_DESCRIPTOR,
                f"{self._tensor.name}: elements {first} to {end} overlap others that came before",
            )
        if count:
            self._insert(at, first, end)

    def _insert(self, at: int, first: int, end: int) -> None:
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends[at]
            del self._starts[at], self._ends[at]
        if at and self._ends[at - 1] == first:
            self._ends[at - 1] = end
        else:
            self._starts.insert(at, first)
            self._ends.insert(at, end)


class Arrivals:
    """Which elements of the announced tensors have come.

    To count them takes longer than to compare with `whole`, the pieces that brought every element once before: as long
    as the very same come in the very same order, nothing is counted.
    """

    def __init__(self, tensors: Mapping[str, TensorShape], whole: Sequence[Pieces]) -> None:
        self._tensors = tensors
        self._whole = whole
        self._coverage: dict[str, Coverage] | None = None
        self.came: list[Pieces] = []

    def add(self, pieces: Pieces) -> None:
        """Raises `invalid_descriptor` if any of the elements has come before."""
        if self._coverage is None and pieces not in self._whole[len(self.came) : len(self.came) + 1]:
            self._coverage = self._counted()
        if self._coverage is not None:
            _count(pieces, self._coverage)
        self.came.append(pieces)

    def incomplete(self) -> list[dict[str, Any]]:
        """`{name, expected, received}` of each tensor of which elements are missing."""
        if self._coverage is None and self._whole and len(self.came) == len(self._whole):
            return []
        coverage = self._counted() if self._coverage is None else self._coverage
        return [
            {"name": name, "expected": self._tensors[name].elements, "received": found.received}
            for name, found in coverage.items()
            if not found.is_complete
        ]

    def _counted(self) -> dict[str, Coverage]:
        coverage = {name: Coverage(tensor) for name, tensor in self._tensors.items()}
        for pieces in self.came:
            _count(pieces, coverage)
        return coverage


def _count(pieces: Pieces, coverage: Mapping[str, Coverage]) -> None:
    for piece in pieces:
        coverage[piece.name].add(piece.first, piece.count)


@dataclass(frozen=True)
class Announcement:
    """What a bucket refit will bring. `loader_tensors` go through vLLM's loader once they are complete."""

    plan: Plan
    tensors: Mapping[str, TensorShape]
    loader_tensors: Mapping[str, str]

    def is_same(self, other: Announcement) -> bool:
        """In the same order, too: broadcasts come in that."""
        return self == other and [*self.tensors] == [*other.tensors]

    @property
    def path(self) -> str:
        if not self.loader_tensors:
            return "plan"
        return (
            "mixed" if any(name in self.plan.routes for name in self.tensors.keys() - self.loader_tensors) else "loader"
        )


def announce(weights: EngineWeights, tensors: Sequence[TensorShape], *, partial: bool, planned: bool) -> Announcement:
    """Raises `manifest_mismatch`, or `plan_required` for half a layer that needs the loader."""
    weights.check_manifest(tensors, complete=not partial)
    by_name = {tensor.name: tensor for tensor in tensors}
    weights.check_selection(by_name, available=by_name)
    plan = weights.plan
    loader_tensors = {name: plan.loader_only[name] for name in by_name if name in plan.loader_only}
    if not planned:
        loader_tensors = {name: PLAN_OFF for name in by_name if name in plan.routes or name in plan.loader_only}
    plan.check_whole_modules(loader_tensors, by_name)
    return Announcement(plan, by_name, loader_tensors)


class BucketSource:
    """Mapped staging buffers, and the copies compiled for the layouts that came in them."""

    def __init__(self, segments: Buckets, planned: bool, release: Release | None = None) -> None:
        self.segments = segments
        self._release = release
        self._planned = planned
        self._announced: Announcement | None = None
        self._begun: tuple[Announcement, bool, bool] | None = None
        self._programs: dict[tuple[int, Pieces], Program] = {}
        self._compiled_for: Announcement | None = None
        self._whole: tuple[Announcement, list[Pieces]] | None = None
        self._numbered: dict[int, Pieces] = {}

    def announce(
        self, weights: EngineWeights, tensors: Sequence[TensorShape], *, partial: bool, planned: bool
    ) -> Announcement:
        """See the function of this name."""
        announced = announce(weights, tensors, partial=partial, planned=self._planned and planned)
        if self._announced is None or not announced.is_same(self._announced):
            self._announced = announced
        return self._announced

    def tell_done(self, number: int | None) -> None:
        """That of a refit of which nothing is left to do, if its trainer has given it one."""
        if number is not None and self._release is not None:
            self._release.tell_done(number)

    def announce_next(
        self, weights: EngineWeights, tensors: Sequence[TensorShape] | None, *, partial: bool, planned: bool
    ) -> Announcement:
        """Announces what a refit brings; None: what the last one brought, which need not be validated again unless
        the plan has changed since."""
        if tensors is None:
            assert self._begun is not None, "the daemon has announced this source's tensors before"
            before, *how = self._begun
            if before.plan is weights.plan and how == [partial, planned]:
                return before
            tensors = [*before.tensors.values()]
        announced = self.announce(weights, tensors, partial=partial, planned=planned)
        self._begun = announced, partial, planned
        return announced

    def arrivals(self, announced: Announcement) -> Arrivals:
        """Of a refit that begins."""
        if self._whole is None or self._whole[0] is not announced:
            return Arrivals(announced.tensors, [])
        return Arrivals(announced.tensors, self._whole[1])

    def note_whole(self, announced: Announcement, came: list[Pieces]) -> None:
        """These pieces, in this order, bring every element of what was announced once."""
        self._whole = announced, came

    def numbered(self, number: int | None, pieces: Pieces) -> Pieces:
        """The pieces, which have that number from now on; those that have it where none are given."""
        if number is None:
            return pieces
        if pieces:
            self._numbered[number] = pieces
        return self._numbered[number]

    def program(self, weights: EngineWeights, announced: Announcement, bucket: int, pieces: Pieces) -> Program:
        """The planned copies of a bucket with this layout; compiled the first time it is seen."""
        if announced is not self._compiled_for:
            # Another one may have been validated while a refit is under way, or have come since.
            self._programs.clear()
            self._compiled_for = announced
        key = bucket, pieces
        found = self._programs.get(key)
        if found is None:
            copies = [copy for piece in pieces for copy in self._copies(weights, announced, bucket, piece)]
            found = copy_program(copies)
            if len(self._programs) < MAX_LAYOUTS:
                self._programs[key] = found
        return found

    def piece(self, bucket: int, piece: BucketPiece, dtype: DType) -> tuple[torch.Tensor, int]:
        """The bucket in the tensor's dtype, and the index there of the piece's first element."""
        return self.segments.typed(bucket, dtype), piece.offset_bytes // torch_dtype(dtype).itemsize

    def close(self) -> None:
        self._programs.clear()
        self.segments.close()

    def _copies(self, weights: EngineWeights, announced: Announcement, bucket: int, piece: BucketPiece) -> list[Copy]:
        if piece.name in announced.loader_tensors:
            return []
        flat, at = self.piece(bucket, piece, announced.tensors[piece.name].dtype)
        return [
            Copy(flat, weights.flat(route.parameter), Transfer(part.source.moved(at - piece.first), part.target))
            for route in announced.plan.routes.get(piece.name, ())
            for part in route.transfer.clipped(piece.first, piece.first + piece.count)
        ]


class BucketRefit:
    """One refit under way: what has come so far, and tensors that wait in host or device memory for the loader."""

    def __init__(self, weights: EngineWeights, source: BucketSource, announced: Announcement) -> None:
        self.announced = announced
        self._weights = weights
        self.source = source
        self._arrivals = source.arrivals(announced)
        self._staged = {
            name: torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device=weights.device)
            for name, tensor in announced.tensors.items()
            if name in announced.loader_tensors or name in weights.aliases
        }
        self.size_bytes = 0
        self._begun = 0
        self._arrived = 0

    def accept(self, pieces: Pieces) -> int:
        """The how-manieth bucket it is. Raises `invalid_descriptor` for elements that came before; nothing is read
        yet."""
        self._arrivals.add(pieces)
        return len(self._arrivals.came) - 1

    def turns_until_written(self, number: int, bucket: int) -> Iterator[None]:
        """Yields until the trainer's writes to this bucket, the `number`th, can be read, and all before it are on their
        way."""
        yield from self.source.segments.turns_until_written(bucket)
        while self._begun < number:
            yield

    def copy_in_turns(self, bucket: int, pieces: Pieces) -> Generator[None, None, int]:
        """Reads the whole bucket, which may be overwritten afterwards; yields until then, and returns the bytes that
        went into the engine."""
        program = self.source.program(self._weights, self.announced, bucket, pieces)
        self._begun += 1
        program.start()
        staged = [piece for piece in pieces if piece.name in self._staged]
        for piece in staged:
            self._stage(bucket, piece)
        if staged:
            wait_for_stream(self._weights.device)
        self.size_bytes += program.size_bytes
        while not program.has_arrived():
            yield
        self._arrived += 1
        return program.size_bytes

    def copy(self, bucket: int, pieces: Pieces) -> None:
        """The same at once, of a bucket that was written by this process."""
        for _ in self.copy_in_turns(bucket, pieces):
            pass

    @property
    def is_on_its_way(self) -> bool:
        """Whether all buckets that came so far are being copied, or have been."""
        return self._begun == len(self._arrivals.came)

    @property
    def has_arrived(self) -> bool:
        """Whether all of them have been copied."""
        return self._arrived == len(self._arrivals.came)

    @property
    def is_copied_whole(self) -> bool:
        """Whether nothing of it waits for the loader, or to be compared."""
        return not self._staged

    @property
    def has_written(self) -> bool:
        """Whether a bucket has gone into the engine."""
        return self.size_bytes > 0

    def note_written(self, size_bytes: int) -> None:
        """Of a bucket that came straight to its place in the engine."""
        self.size_bytes += size_bytes
        self._begun += 1
        self._arrived += 1

    def require_complete(self) -> None:
        """Raises `manifest_mismatch` listing the tensors of which elements are missing."""
        short = self._arrivals.incomplete()
        if short:
            names = ", ".join(str(item["name"]) for item in short[:5])
            message = f"{len(short)} tensors are incomplete: {names}"
            raise ProtocolError(ErrorCode.MANIFEST_MISMATCH, message, incomplete=short[:100])
        self.source.note_whole(self.announced, [*self._arrivals.came])

    def load_staged(self) -> None:
        """Hands complete tensors to vLLM's loader; a head must equal the embedding it is tied to."""
        aliases = self._weights.aliases
        loaded = [(name, tensor) for name, tensor in self._staged.items() if name not in aliases]
        if loaded:
            self._weights.load(loaded)
        for name in self._staged.keys() & aliases.keys():
            self._check_alias(name, aliases[name])

    def _stage(self, bucket: int, piece: BucketPiece) -> None:
        flat, at = self.source.piece(bucket, piece, self.announced.tensors[piece.name].dtype)
        self._staged[piece.name].view(-1)[piece.first : piece.first + piece.count].copy_(flat[at : at + piece.count])

    def _check_alias(self, name: str, other: str) -> None:
        staged = self._staged[name].view(-1)
        for route in self._weights.plan.routes.get(other, ()):
            target = self._weights.flat(route.parameter)
            held = view_of(target, route.transfer.target)
            check_same(name, view_of(staged, route.transfer.source).to(target.dtype), other, held)
