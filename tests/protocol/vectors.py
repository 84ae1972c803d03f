"""The files in protocol/vectors, as a client in another language would read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parents[2] / "protocol" / "vectors"


def read_vectors(name: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((DIRECTORY / f"{name}.json").read_text())
    return vectors


def frames_of(vector: dict[str, Any]) -> list[bytes]:
    """Frames are hex, or lists of `[hex, how often]`."""
    return [
        bytes.fromhex(frame)
        if isinstance(frame, str)
        else b"".join(bytes.fromhex(part) * times for part, times in frame)
        for frame in vector["frames"]
    ]


def with_bytes(value: Any) -> Any:
    """The meaning of a vector, its `{"hex": ...}` read."""
    if isinstance(value, dict):
        if value.keys() == {"hex"}:
            return bytes.fromhex(value["hex"])
        return {key: with_bytes(item) for key, item in value.items()}
    return [with_bytes(item) for item in value] if isinstance(value, list) else value
