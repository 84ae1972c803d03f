"""The published vectors hold for this implementation, and are complete."""

from __future__ import annotations

import importlib.util
import json
import resource
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest

from refit_protocol.codec import decode_reply, decode_request, encode_reply, encode_request
from refit_protocol.errors import ProtocolError
from refit_protocol.messages import Reply, ReplyHeader, Request, RequestHeader
from tests.protocol.vectors import DIRECTORY, frames_of, read_vectors, with_bytes

REQUESTS, REPLIES, INVALID = map(read_vectors, ("requests", "replies", "invalid_requests"))
MEGABYTE = 1 << 20


def named(vectors: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("vector", vectors, ids=[vector["name"] for vector in vectors])


@named(REQUESTS)
def test_request_means_what_the_vector_says(vector: dict[str, Any]) -> None:
    frames = frames_of(vector)
    meant = msgspec.convert(with_bytes(vector["meaning"]), RequestHeader, builtin_types=(bytes,))
    assert decode_request(frames) == (meant, [])
    assert encode_request(meant) == frames


@named(REPLIES)
def test_reply_means_what_the_vector_says(vector: dict[str, Any]) -> None:
    frames = frames_of(vector)
    meant = msgspec.convert(with_bytes(vector["meaning"]), ReplyHeader, builtin_types=(bytes,))
    assert decode_reply(frames) == (meant, [])
    assert encode_reply(meant) == frames


@named(INVALID)
def test_invalid_request_is_refused(vector: dict[str, Any]) -> None:
    """With the code the vector names, and without memory or time that grows beyond the message's own size."""
    frames = frames_of(vector)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ProtocolError) as refusal:
        decode_request(frames)
    assert refusal.value.code == vector["code"]
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown_bytes < 200 * MEGABYTE


@pytest.mark.parametrize(("union", "vectors"), [(Request, REQUESTS), (Reply, REPLIES)])
def test_every_message_and_every_field_has_a_vector(union: Any, vectors: list[dict[str, Any]]) -> None:
    bodies = [vector["meaning"]["body"] for vector in vectors]
    for kind in get_args(union):
        shown = {field for body in bodies if body["type"] == kind.__name__ for field in body} - {"type"}
        assert shown == set(kind.__struct_fields__), kind.__name__


def test_files_are_what_the_script_writes() -> None:
    """A message that was changed needs `scripts/make-vectors`."""
    for name, vectors in load_script().all_vectors().items():
        assert json.loads((DIRECTORY / f"{name}.json").read_text()) == vectors


def load_script() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts" / "make_vectors.py"
    spec = importlib.util.spec_from_file_location("make_vectors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
