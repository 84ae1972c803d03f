"""Writes protocol/vectors: bytes and meaning of every message, and of what has to be refused.

For every message there is a vector with the required fields only, and one with every field given. The values are made
from the types, so that no message and no field can be forgotten.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec

from refit_protocol.codec import MAGIC, encode_reply, encode_request
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import Reply, ReplyHeader, Request, RequestHeader

DIRECTORY = Path(__file__).resolve().parent.parent / "protocol" / "vectors"
SESSION = "00112233445566778899aabbccddeeff"


def main(directory: Path = DIRECTORY) -> None:
    directory.mkdir(exist_ok=True)
    for name, vectors in all_vectors().items():
        (directory / f"{name}.json").write_text(json.dumps(vectors, indent=1) + "\n")


def all_vectors() -> dict[str, list[dict[str, Any]]]:
    """By file name."""
    return {"requests": list(requests()), "replies": list(replies()), "invalid_requests": list(invalid_requests())}


# --- valid ------------------------------------------------------------------------------------------------------------


def requests() -> Iterator[dict[str, Any]]:
    for kind in get_args(Request):
        for fields in ("required", "all"):
            header = RequestHeader(id=7, session=SESSION, body=Samples(fields == "all").of(kind))
            yield vector(f"{kind.__name__}, {fields} fields", header, encode_request(header))


def replies() -> Iterator[dict[str, Any]]:
    for kind in get_args(Reply):
        for fields in ("required", "all"):
            header = ReplyHeader(id=7, last=fields == "all", body=Samples(fields == "all").of(kind))
            yield vector(f"{kind.__name__}, {fields} fields", header, encode_reply(header))


def vector(name: str, header: RequestHeader | ReplyHeader, frames: list[Any]) -> dict[str, Any]:
    return {"name": name, "frames": [bytes(frame).hex() for frame in frames], "meaning": readable(header)}


def readable(header: RequestHeader | ReplyHeader) -> Any:
    """JSON natives; bytes become `{"hex": ...}`."""
    return _readable(msgspec.to_builtins(header, builtin_types=(bytes,)))


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(item) for item in value]
    return value


class Samples:
    """One value of any type of the protocol; numbers differ, so that swapped fields show."""

    def __init__(self, every_field: bool) -> None:
        self._every_field = every_field
        self._numbers = count(1)

    def of(self, kind: Any) -> Any:
        return msgspec.convert(self._native(msgspec.inspect.type_info(kind)), kind, builtin_types=(bytes,))

    def _native(self, kind: msgspec.inspect.Type, name: str = "value") -> Any:
        simple = {
            msgspec.inspect.IntType: lambda: next(self._numbers),
            msgspec.inspect.FloatType: lambda: next(self._numbers) + 0.5,
            msgspec.inspect.StrType: lambda: name,
            msgspec.inspect.BoolType: lambda: True,
            msgspec.inspect.BytesType: lambda: bytes(range(64)),
            msgspec.inspect.AnyType: lambda: {"anything": [1, None, "text"]},
            msgspec.inspect.NoneType: lambda: None,
        }
        if type(kind) in simple:
            return simple[type(kind)]()
        return self._compound(kind, name)

    def _compound(self, kind: Any, name: str) -> Any:
        inspect = msgspec.inspect
        if isinstance(kind, inspect.LiteralType):
            return kind.values[-1]
        if isinstance(kind, inspect.EnumType):
            return next(iter(kind.cls)).value
        if isinstance(kind, inspect.UnionType):
            return self._native(next(part for part in kind.types if not isinstance(part, inspect.NoneType)), name)
        if isinstance(kind, inspect.ListType | inspect.VarTupleType):
            return [self._native(kind.item_type, name), self._native(kind.item_type, name)]
        if isinstance(kind, inspect.TupleType):
            return [self._native(part, name) for part in kind.item_types]
        if isinstance(kind, inspect.DictType):
            return {"key": self._native(kind.value_type, name)}
        assert isinstance(kind, inspect.StructType), kind
        return self._struct(kind)

    def _field(self, field: msgspec.inspect.Field) -> Any:
        """Not the default, which would be left out."""
        if isinstance(field.type, msgspec.inspect.BoolType):
            return field.default is not True
        if isinstance(field.type, msgspec.inspect.LiteralType):
            return next(value for value in field.type.values if value != field.default)
        return self._native(field.type, field.name)

    def _struct(self, kind: msgspec.inspect.StructType) -> Any:
        fields = {field.encode_name: self._field(field) for field in kind.fields if field.required or self._every_field}
        if kind.array_like:
            return list(fields.values())
        return fields if kind.tag is None else {str(kind.tag_field): kind.tag, **fields}


# --- invalid ----------------------------------------------------------------------------------------------------------


def invalid_requests() -> Iterator[dict[str, Any]]:
    """Frames as lists of `[hex, how often]`, so that bombs stay small on disk."""
    magic = [[MAGIC.hex(), 1]]
    for name, header, code in hostile_headers():
        yield {"name": name, "frames": [magic, header], "code": code.value}
    empty = [once(msgpack.packb({"id": 1, "body": {"type": "GetStatus"}}))]
    for name, frames in {
        "no frame": [],
        "no header": [magic],
        "wrong magic": [[once(b"RFT2")], empty],
        "a pickle instead of the magic": [[once(pickle.dumps(print))], empty],
    }.items():
        yield {"name": name, "frames": frames, "code": ErrorCode.MALFORMED_MESSAGE.value}
    yield {
        "name": "more blobs than allowed",
        "frames": [magic, empty, *[[once(b"x")]] * 17],
        "code": ErrorCode.MESSAGE_TOO_LARGE.value,
    }


def once(content: bytes) -> list[Any]:
    return [content.hex(), 1]


def hostile_headers() -> Iterator[tuple[str, list[list[Any]], ErrorCode]]:
    malformed, too_large = ErrorCode.MALFORMED_MESSAGE, ErrorCode.MESSAGE_TOO_LARGE
    for name, content in malformed_headers().items():
        yield name, [once(content)], malformed
    yield "100,000 levels of arrays", [["91", 100_000], once(b"\xc0")], malformed
    yield "33 levels inside a free-form field", [once(nested_field(33))], malformed
    yield "a megabyte of empty arrays", [once(b"\xdd" + struct.pack(">I", 1 << 20)), ["90", 1 << 20]], malformed
    inner = b"\xdd" + struct.pack(">I", 1 << 18)
    yield (
        "more items than allowed in sixteen arrays",
        [once(b"\xdc\x00\x10"), *[part for _ in range(16) for part in (once(inner), ["c0", 1 << 18])]],
        too_large,
    )
    yield "a header larger than allowed", [["c0", (16 << 20) + 1]], too_large


def malformed_headers() -> dict[str, bytes]:
    pack = msgpack.packb
    status = {"type": "GetStatus"}
    generate = {"type": "Generate", "prompt_lengths": [1]}
    return {
        "empty": b"",
        "a pickle": pickle.dumps(print),
        "a function and its arguments": pack(["os.system", ["true"]]),
        "array of 2^32 - 1 items": b"\xdd\xff\xff\xff\xff",
        "map of 2^32 - 1 items": b"\xdf\xff\xff\xff\xff",
        "string of 2^32 - 1 bytes": b"\xdb\xff\xff\xff\xff",
        "never used opcode": b"\xc1",
        "bad UTF-8": pack({"id": 1, "body": {"type": b"\xff\xfe"}}, use_bin_type=False),
        "integer keys": pack({1: 2}),
        "binary keys": pack({b"id": 1}),
        "null key": pack({None: 1}),
        "trailing bytes": pack({"id": 1, "body": status}) + b"\x00",
        "duplicate keys": b"\x82\xa2id\x01\xa2id\x02",
        "extension type": b"\xd4\x2a\x00",
        "timestamp": b"\x82\xa2id\xd6\xff\x00\x00\x00\x01\xa4body\x81\xa4type\xa9GetStatus",
        "id missing": pack({"body": status}),
        "id is text": pack({"id": "1", "body": status}),
        "id is a bool": pack({"id": True, "body": status}),
        "id is a fraction": pack({"id": 1.5, "body": status}),
        "body missing": pack({"id": 1}),
        "body is a list": pack({"id": 1, "body": []}),
        "unknown command": pack({"id": 1, "body": {"type": "RunThis"}}),
        "a reply as request": pack({"id": 1, "body": {"type": "SessionClosed"}}),
        "unknown field": pack({"id": 1, "body": {**status, "verbose": True}}),
        "unknown field of the header": pack({"id": 1, "body": status, "priority": 1}),
        "not a number": pack({"id": 1, "body": {**generate, "deadline_seconds": math.nan}}),
        "infinity": pack({"id": 1, "body": {**generate, "sampling": {"temperature": math.inf}}}),
        "token count beyond 64 bits": pack({"id": 1, "body": {**generate, "prompt_lengths": [1e30]}}),
        "prompt length is text": pack({"id": 1, "body": {**generate, "prompt_lengths": ["1"]}}),
        "unknown policy": pack({"id": 1, "body": {"type": "CommitRefit", "epoch": 1, "source": 1, "policy": "hope"}}),
        "unknown dtype": pack(
            {
                "id": 1,
                "body": {
                    "type": "BeginRefit",
                    "epoch": 1,
                    "source": 1,
                    "tensors": [{"name": "w", "dtype": "complex64", "shape": [1]}],
                },
            }
        ),
        "pickle as CUDA handle": pack(
            {
                "id": 1,
                "body": {
                    "type": "OpenSource",
                    "epoch": 1,
                    "kind": "inplace",
                    "segments": [{"kind": "cuda_ipc", "pid": 1, "device_uuid": "GPU-0", "handle": ["f", []]}],
                },
            }
        ),
    }


def nested_field(levels: int) -> bytes:
    value: Any = None
    for _ in range(levels):
        value = [value]
    packed: bytes = msgpack.packb(
        {"id": 1, "body": {"type": "Generate", "sampling": {"structured": {"grammar": value}}}}
    )
    return packed


if __name__ == "__main__":
    main()
