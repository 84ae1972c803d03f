"""Whether a model directory holds what a load needs, found out in milliseconds instead of after minutes of loading."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# Any one of them: the tokenizer's own configuration alone makes one without a vocabulary. A GGUF file holds its own.
TOKENIZER_PATTERNS = (
    "tokenizer.json",
    "tokenizer.model*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*vocab*",
    "merges.txt",
    "tokenization_*.py",
    "*.gguf",
)
LFS_POINTER = b"version https://git-lfs"
INDEX_PATTERN = "*.index.json"
# The format's own limit.
MAX_HEADER_BYTES = 100 << 20


def model_problem(directory: Path, *, weights: bool = True, tokenizer: bool = False) -> str | None:
    """Why this directory cannot be loaded, in one line; None where nothing is missing.

    `weights` False: the engine is to make its own (`load_format = "dummy"`). `tokenizer`: there has to be one too.
    """
    if not directory.is_dir():
        return f"model directory {directory} does not exist"
    if not (directory / "config.json").is_file():
        return f"model directory {directory} has no config.json: is it the right one?"
    if unreadable := _unreadable(directory):
        return f"model directory {directory}: {unreadable} cannot be read by user {os.getuid()}"
    if irregular := _irregular(directory):
        return f"model directory {directory}: {irregular} is no ordinary file"
    if tokenizer and not any(any(directory.glob(pattern)) for pattern in TOKENIZER_PATTERNS):
        return f"model directory {directory} has no tokenizer: copy its files there, or set engine.tokenizer = false"
    return _weights_problem(directory) if weights else None


def weight_bytes(directory: Path) -> int:
    """Of the weights that a load reads; 0 for a model that is not here yet."""
    files = list(directory.glob("*.safetensors")) or list(directory.glob("*.bin"))
    return sum(file.stat().st_size for file in files)


def _weights_problem(directory: Path) -> str | None:
    files = sorted(file for pattern in WEIGHT_PATTERNS for file in directory.glob(pattern))
    if empty := [file.name for file in files if file.stat().st_size == 0]:
        return f"model directory {directory}: {empty[0]} is empty: it was not copied whole"
    # Others than these vLLM does not look at where there are any.
    read = [file for file in files if file.suffix == ".safetensors"] or files
    if pointers := [file.name for file in read if _is_pointer(file)]:
        return f"model directory {directory}: {pointers[0]} only names a file of git-lfs: run git lfs pull there"
    if cut := [file.name for file in read if _is_cut_off(file)]:
        return f"model directory {directory}: {cut[0]} ends too early: it was not copied whole"
    sets = {index: _shards(index) for index in sorted(directory.glob(INDEX_PATTERN))}
    # Repositories hold the same weights in several formats, of which one is enough.
    if {file.name for file in files}.difference(*sets.values()):
        return None
    problems = [_shards_problem(index, shards) for index, shards in sets.items()]
    if problems:
        return None if None in problems else problems[-1]
    return f"model directory {directory} has no weights ({', '.join(WEIGHT_PATTERNS)})"


def _shards_problem(index: Path, shards: set[str]) -> str | None:
    if not shards:
        return f"{index} is no index of weights: it was not copied whole"
    missing = sorted(shard for shard in shards if not (index.parent / shard).is_file())
    if not missing:
        return None
    return f"model directory {index.parent}: {len(missing)} of {len(shards)} weight files missing, {missing[0]} first"


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(LFS_POINTER)) == LFS_POINTER


def _is_cut_off(file: Path) -> bool:
    """Safetensors say in front how long they are: eight bytes with the header's length, then tensors' ends in it."""
    size_bytes = file.stat().st_size
    if file.suffix != ".safetensors":
        return False
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > min(size_bytes - 8, MAX_HEADER_BYTES):
            return True
        try:
            header: Any = msgspec.json.decode(stream.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (msgspec.DecodeError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
            return True
    return size_bytes < 8 + header_bytes + max(ends, default=0)


def _shards(index: Path) -> set[str]:
    """The files that an index names; none where it cannot be read as one."""
    try:
        content: Any = msgspec.json.decode(index.read_bytes())
        return set(content["weight_map"].values())
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, AttributeError):
        return set()


def _irregular(directory: Path) -> str | None:
    """Whoever opens a pipe waits for its other end, and a device may have none."""
    patterns = (*WEIGHT_PATTERNS, "*.json")
    names = (file.name for pattern in patterns for file in directory.glob(pattern) if not file.is_file())
    return next(names, None)


def _unreadable(directory: Path) -> str | None:
    names = (file.name for file in sorted(directory.iterdir()) if not os.access(file, os.R_OK))
    return next(names, None)
