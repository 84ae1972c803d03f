"""A checkpoint on disk: safetensors files, found whole before anything is done with them.

They are read, not mapped: a file that is cut short meanwhile is then an error, where a mapping would end the engine.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import ITEM_BYTES, BucketPiece, DType, TensorShape, aligned, check_shape

INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 << 20
ALIGNMENT_BYTES = 256
# What JSON that is none ends in: nested without end, too.
UNREADABLE = (msgspec.MsgspecError, RecursionError)
DTYPES: dict[str, DType] = {
    "F64": DType.FLOAT64,
    "F32": DType.FLOAT32,
    "F16": DType.FLOAT16,
    "BF16": DType.BFLOAT16,
    "F8_E4M3": DType.FLOAT8_E4M3FN,
    "F8_E5M2": DType.FLOAT8_E5M2,
    "I64": DType.INT64,
    "I32": DType.INT32,
    "I16": DType.INT16,
    "I8": DType.INT8,
    "U8": DType.UINT8,
    "BOOL": DType.BOOL,
}


class _Config(msgspec.Struct, frozen=True):
    architectures: list[str] | None = None


class _Entry(msgspec.Struct, frozen=True):
    """A tensor as a file's header describes it; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class _Place:
    descriptor: int
    offset_bytes: int


class Checkpoint:
    """Open files and where each tensor lies in them. Raises `invalid_checkpoint` for what is missing, short or broken.

    A file that is replaced meanwhile is read as it was; one that is written to meanwhile may be read half old.
    """

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, TensorShape] = {}
        self._places: dict[str, _Place] = {}
        with ExitStack() as files:
            for name, wanted in _files(directory).items():
                self._add(directory / name, wanted, files)
            self._files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def read(self, piece: BucketPiece, into: memoryview) -> None:
        """Fills `into` with the piece's elements."""
        item_bytes = ITEM_BYTES[self.tensors[piece.name].dtype]
        place = self._places[piece.name]
        offset_bytes = place.offset_bytes + piece.first * item_bytes
        done = 0
        while done < len(into):
            count = os.preadv(place.descriptor, [into[done:]], offset_bytes + done)
            if not count:
                raise _invalid(f"{piece.name} was cut short while it was read")
            done += count

    def _add(self, file: Path, wanted: frozenset[str] | None, files: ExitStack) -> None:
        """The tensors of one file, or those of them that the index wants from it."""
        descriptor = _opened(file)
        files.callback(os.close, descriptor)
        header_bytes, entries = _header(file, descriptor)
        size_bytes = os.fstat(descriptor).st_size
        for name in entries.keys() if wanted is None else wanted:
            if name not in entries:
                raise _invalid(f"{file} has no tensor {name}, which the index puts there")
            if name in self.tensors:
                raise _invalid(f"{name} comes in two files, of which {file.name} is one")
            tensor = _tensor(file, name, entries[name])
            begin, end = entries[name].data_offsets
            if begin < 0 or end - begin != tensor.size_bytes or header_bytes + end > size_bytes:
                raise _invalid(f"{file} is not whole: {name} does not lie inside its {size_bytes} bytes")
            self.tensors[name] = tensor
            self._places[name] = _Place(descriptor, header_bytes + begin)


def layouts(tensors: Iterable[TensorShape], bucket_bytes: int) -> Iterator[tuple[BucketPiece, ...]]:
    """All elements of all tensors, in as many buckets as it takes."""
    pieces: list[BucketPiece] = []
    used = 0
    for tensor in tensors:
        item_bytes, first = ITEM_BYTES[tensor.dtype], 0
        while first < tensor.elements:
            offset = aligned(used, ALIGNMENT_BYTES)
            count = min(tensor.elements - first, (bucket_bytes - offset) // item_bytes)
            if count <= 0:
                yield tuple(pieces)
                pieces, used = [], 0
                continue
            pieces.append(BucketPiece(name=tensor.name, first=first, count=count, offset_bytes=offset))
            first, used = first + count, offset + count * item_bytes
    if pieces:
        yield tuple(pieces)


def check_architecture(directory: Path, served: Any) -> None:
    """Raises `invalid_checkpoint` where config.json names another architecture than the one that is served.

    Names and shapes are not enough to tell: some architectures differ in what they compute alone.
    """
    try:
        named = msgspec.json.decode((directory / "config.json").read_bytes(), type=_Config).architectures
    except (OSError, *UNREADABLE) as error:
        raise _invalid(f"{directory / 'config.json'} cannot be read: {error}") from error
    if named and served and named != list(served):
        raise _invalid(f"{directory} is a {', '.join(named)}, the engine serves {', '.join(served)}")


def _files(directory: Path) -> Mapping[str, frozenset[str] | None]:
    """Names of the files, and of the tensors wanted of each; None: all."""
    index = directory / INDEX
    if index.is_file():
        return _indexed(index)
    found = sorted(file.name for file in directory.glob("*.safetensors"))
    if not found:
        raise _invalid(f"{directory} has no *.safetensors: other formats are not read")
    return dict.fromkeys(found)


def _indexed(index: Path) -> Mapping[str, frozenset[str]]:
    try:
        content = msgspec.convert(msgspec.json.decode(index.read_bytes())["weight_map"], dict[str, str])
    except (OSError, *UNREADABLE, KeyError, TypeError) as error:
        raise _invalid(f"{index} is no index of weights: {error}") from error
    if outside := [file for file in content.values() if file != Path(file).name]:
        raise _invalid(f"{index} names {outside[0]!r}, which is no file beside it")
    files = sorted(set(content.values()))
    return {file: frozenset(name for name, in_file in content.items() if in_file == file) for file in files}


def _opened(file: Path) -> int:
    """Not blocking, since a pipe in the file's place would keep the engine waiting for ever."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _invalid(f"{file} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _invalid(f"{file} is no ordinary file")
    return descriptor


def _header(file: Path, descriptor: int) -> tuple[int, dict[str, _Entry]]:
    """Bytes before the data, and what the data is."""
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    if not 0 < length <= MAX_HEADER_BYTES:
        raise _invalid(f"{file} is no safetensors file")
    try:
        content = msgspec.json.decode(os.pread(descriptor, length, LENGTH_BYTES), type=dict[str, msgspec.Raw])
        described = {name: raw for name, raw in content.items() if name != "__metadata__"}
        return LENGTH_BYTES + length, {name: msgspec.json.decode(raw, type=_Entry) for name, raw in described.items()}
    except UNREADABLE as error:
        raise _invalid(f"{file} is no safetensors file: {error}") from error


def _tensor(file: Path, name: str, entry: _Entry) -> TensorShape:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise _invalid(f"{file}: {name} is of dtype {entry.dtype}, which cannot be read")
    tensor = TensorShape(name=name, dtype=dtype, shape=entry.shape)
    try:
        check_shape(tensor)
    except ProtocolError as error:
        raise _invalid(f"{file}: {error.message}") from error
    return tensor


def _invalid(message: str) -> ProtocolError:
    return ProtocolError(ErrorCode.INVALID_CHECKPOINT, message)
