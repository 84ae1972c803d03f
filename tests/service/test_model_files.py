"""What is missing from a model directory is named before anything is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from refitd.model_files import model_problem

# A whole file of safetensors: the length of its header, and the header.
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole model of two shards."""
    (tmp_path / "config.json").write_text("{}")
    shards = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    for shard in shards:
        (tmp_path / shard).write_bytes(NO_TENSORS)
    weight_map = {f"layer.{number}": shard for number, shard in enumerate(shards)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_a_whole_model_has_no_problem(model: Path) -> None:
    """With an index and without one."""
    assert model_problem(model) is None
    (model / "model.safetensors.index.json").unlink()
    assert model_problem(model) is None


def empty_shard(model: Path) -> None:
    (model / "model-1-of-2.safetensors").write_bytes(b"")


def pointer_instead(model: Path) -> None:
    (model / "model-1-of-2.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def cut_off(model: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (model / "model-2-of-2.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(15))


def cut_off_in_its_header(model: Path) -> None:
    (model / "model-2-of-2.safetensors").write_bytes((1 << 20).to_bytes(8, "little") + b'{"w": ')


def no_weights(model: Path) -> None:
    for file in model.glob("model*"):
        file.unlink()


def break_index(model: Path) -> None:
    no_weights(model)
    (model / "model.safetensors.index.json").write_text('{"weight_map": ')


def nested_header(model: Path) -> None:
    nested = b"[" * 100_000
    (model / "model-2-of-2.safetensors").write_bytes(len(nested).to_bytes(8, "little") + nested)


def nested_index(model: Path) -> None:
    no_weights(model)
    (model / "model.safetensors.index.json").write_text("[" * 100_000)


def pipe_as_index(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    os.mkfifo(model / "model.safetensors.index.json")


def device_as_weights(model: Path) -> None:
    (model / "model-1-of-2.safetensors").unlink()
    (model / "model-1-of-2.safetensors").symlink_to("/dev/zero")


def header_without_end(model: Path) -> None:
    with (model / "model-2-of-2.safetensors").open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate(1 << 41)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda model: (model / "config.json").unlink(), "no config.json"),
        (lambda model: (model / "model-2-of-2.safetensors").unlink(), "1 of 2 weight files missing, model-2-of-2"),
        (empty_shard, "model-1-of-2.safetensors is empty"),
        (pointer_instead, "model-1-of-2.safetensors only names a file of git-lfs"),
        (cut_off, "model-2-of-2.safetensors ends too early"),
        (cut_off_in_its_header, "model-2-of-2.safetensors ends too early"),
        (no_weights, "has no weights"),
        (break_index, "is no index of weights"),
        (pipe_as_index, "model.safetensors.index.json is no ordinary file"),
        (device_as_weights, "model-1-of-2.safetensors is no ordinary file"),
        (lambda model: (model / "more.safetensors").mkdir(), "more.safetensors is no ordinary file"),
        (nested_header, "model-2-of-2.safetensors ends too early"),
        (nested_index, "is no index of weights"),
        (header_without_end, "model-2-of-2.safetensors ends too early"),
        (lambda model: (model / "tokenizer.json").symlink_to(model / "gone"), "tokenizer.json cannot be read"),
    ],
)
def test_what_is_missing_is_named(model: Path, damage: Callable[[Path], None], named: str) -> None:
    """One line, with the file in it."""
    damage(model)
    problem = model_problem(model)
    assert problem is not None
    assert named in problem
    assert "\n" not in problem


def test_one_format_of_several_is_enough(model: Path) -> None:
    """A repository lists its weights in two formats, and only one was fetched; or holds them in one more file."""
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"layer.0": "pytorch-1-of-1.bin"}}))
    assert model_problem(model) is None
    (model / "model-2-of-2.safetensors").unlink()
    assert model_problem(model) is not None
    (model / "consolidated.safetensors").write_bytes(NO_TENSORS)
    assert model_problem(model) is None


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model", "vocab.json", "qwen.tiktoken", "rwkv_vocab.txt"])
def test_a_tokenizer_has_to_be_there_where_one_is_wanted(model: Path, file: str) -> None:
    """Of any kind; its configuration alone would make one that turns every prompt into no token at all."""
    (model / "tokenizer_config.json").write_text("{}")
    problem = model_problem(model, tokenizer=True)
    assert problem is not None
    assert "has no tokenizer" in problem
    (model / file).write_text("{}")
    assert model_problem(model, tokenizer=True) is None


def test_dummy_weights_need_no_files(model: Path) -> None:
    """With load_format "dummy" the configuration is enough."""
    no_weights(model)
    assert model_problem(model, weights=False) is None


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """The commonest mistake of all."""
    assert model_problem(tmp_path / "gone") == f"model directory {tmp_path / 'gone'} does not exist"
