"""Checkpoint files: read exactly, and refused before use where they are not whole. No engine."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import ITEM_BYTES, DType, TensorShape, check_pieces
from refitd.worker.checkpoint import INDEX, Checkpoint, check_architecture, layouts

TENSORS = {
    "a.weight": torch.arange(24, dtype=torch.float32).view(4, 6),
    "b.weight": torch.randn(7).to(torch.bfloat16),
    "c.scalar": torch.tensor(3, dtype=torch.int64),
    "d.empty": torch.empty(0, 5, dtype=torch.float16),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def read(checkpoint: Checkpoint, bucket_bytes: int) -> dict[str, bytes]:
    found = {name: bytearray(tensor.size_bytes) for name, tensor in checkpoint.tensors.items()}
    for pieces in layouts(checkpoint.tensors.values(), bucket_bytes):
        for piece in pieces:
            item_bytes = ITEM_BYTES[checkpoint.tensors[piece.name].dtype]
            first, end = piece.first * item_bytes, (piece.first + piece.count) * item_bytes
            checkpoint.read(piece, memoryview(found[piece.name])[first:end])
    return {name: bytes(data) for name, data in found.items()}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("bucket_bytes", [8, 40, 1 << 20])
def test_every_byte_is_read_whatever_the_bucket(directory: Path, bucket_bytes: int) -> None:
    """Scalars, empty tensors and odd sizes included."""
    with Checkpoint(directory) as checkpoint:
        assert read(checkpoint, bucket_bytes) == {name: raw(tensor) for name, tensor in TENSORS.items()}
        assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == {
            name: tuple(tensor.shape) for name, tensor in TENSORS.items()
        }


def test_an_index_says_which_tensors_are_wanted_of_which_file(tmp_path: Path) -> None:
    """What else lies in the files or in the directory is not part of the checkpoint."""
    save_file(TENSORS, tmp_path / "one.safetensors")
    save_file({"e": torch.ones(2)}, tmp_path / "two.safetensors")
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a.weight": "one.safetensors", "e": "two.safetensors"}}))
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors.keys() == {"a.weight", "e"}


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _write(data: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(data) and None


def _header(entry: dict[str, object]) -> bytes:
    header = json.dumps({"t": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(64)


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        Path.unlink,
        _write(b""),
        _write(b"\x01"),
        _write(struct.pack("<Q", 1 << 60)),
        _write(struct.pack("<Q", 4) + b"null"),
        _write(struct.pack("<Q", 9) + b'{"t": {}}'),
        _write(struct.pack("<Q", 100_000) + b"[" * 100_000),
        _write(_header({"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]})),
        _write(_header({"dtype": "F32", "shape": [4], "data_offsets": [0, 12]})),
        _write(_header({"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 16]})),
        _write(_header({"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]})),
        _write(_header({"dtype": "U4", "shape": [4], "data_offsets": [0, 2]})),
    ],
)
def test_what_is_not_whole_is_refused(directory: Path, damage: Callable[[Path], None]) -> None:
    """Cut, missing, empty, of another format, or with tensors that cannot lie in it."""
    damage(directory / "model.safetensors")
    with pytest.raises(ProtocolError) as refused:
        Checkpoint(directory)
    assert refused.value.code is ErrorCode.INVALID_CHECKPOINT


@pytest.mark.parametrize(
    "index", ["", "[]", "[" * 100_000, '{"weight_map": {"a.weight": "../x"}}', '{"weight_map": {"z": "m"}}']
)
def test_an_index_that_leads_nowhere_is_refused(directory: Path, index: str) -> None:
    """Neither unreadable nor naming a file elsewhere or that is missing."""
    (directory / INDEX).write_text(index)
    with pytest.raises(ProtocolError) as refused:
        Checkpoint(directory)
    assert refused.value.code is ErrorCode.INVALID_CHECKPOINT


def test_a_file_that_shrinks_while_it_is_read_is_an_error(directory: Path) -> None:
    """Where a mapping would have ended the process."""
    with Checkpoint(directory) as checkpoint:
        with (directory / "model.safetensors").open("r+b") as file:
            file.truncate(200)
        with pytest.raises(ProtocolError) as refused:
            read(checkpoint, 1 << 20)
    assert refused.value.code is ErrorCode.INVALID_CHECKPOINT


def test_another_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    """Although names and shapes may be the same."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    check_architecture(tmp_path, ["LlamaForCausalLM"])
    with pytest.raises(ProtocolError, match="MistralForCausalLM"):
        check_architecture(tmp_path, ["MistralForCausalLM"])


@pytest.mark.parametrize("config", ["[]", '{"architectures": 5}', '{"architectures": [5]}', "[" * 100_000, "\xff"])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, config: str) -> None:
    """However it is broken: it is the checkpoint's fault, and no bug."""
    (tmp_path / "config.json").write_text(config, encoding="latin-1")
    with pytest.raises(ProtocolError) as refused:
        check_architecture(tmp_path, ["LlamaForCausalLM"])
    assert refused.value.code is ErrorCode.INVALID_CHECKPOINT


@given(st.lists(st.tuples(st.sampled_from(list(DType)), st.integers(0, 400)), max_size=12), st.integers(8, 2000))
def test_layouts_hold_every_element_once(tensors: list[tuple[DType, int]], bucket_bytes: int) -> None:
    """In order, inside the bucket, aligned, without overlap."""
    shapes = [TensorShape(name=f"t{i}", dtype=dtype, shape=(size,)) for i, (dtype, size) in enumerate(tensors)]
    by_name = {shape.name: shape for shape in shapes}
    next_element = dict.fromkeys(by_name, 0)
    for pieces in layouts(shapes, bucket_bytes):
        check_pieces(list(pieces), by_name, bucket_bytes)
        for piece in pieces:
            assert piece.first == next_element[piece.name]
            next_element[piece.name] += piece.count
    assert next_element == {shape.name: shape.elements for shape in shapes}


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_ordinary_file_is_refused_at_once(directory: Path, make: Callable[[Path], object]) -> None:
    """Whoever opens a pipe waits for its other end: here that would be the engine."""
    make(directory / "more.safetensors")
    with pytest.raises(ProtocolError, match="no ordinary file") as refused:
        Checkpoint(directory)
    assert refused.value.code is ErrorCode.INVALID_CHECKPOINT
