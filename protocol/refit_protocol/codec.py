"""Message <-> frames: `[b"RFT1", header, blob...]`, the header being message-pack.

The identity and the empty delimiter before these frames belong to the socket and are not seen here.
Nothing is evaluated or unpickled: a header becomes one of the structs in `messages`, or the frame is refused.

Requests come from anybody, so they are unpacked under limits and looked at before they are converted. Replies come
from the daemon that a client chose to trust, so they are decoded straight into their structs: a quarter of the time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import msgspec

from refit_protocol.choices import allowed_values
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import ReplyHeader, RequestHeader

MAGIC = b"RFT1"
MAX_REASON = 400
# A header has three keys; what is searched for an id may be anything.
SALVAGED_KEYS = 8
SALVAGED_TEXT_BYTES = 64

Frame = bytes | memoryview

_pack = msgspec.msgpack.Encoder().encode
_reply_decoder = msgspec.msgpack.Decoder(ReplyHeader)


@dataclass(frozen=True)
class CodecLimits:
    """What a decoder accepts. The daemon's come from its configuration."""

    header_bytes: int = 16 << 20
    blob_bytes: int = 256 << 20
    blobs: int = 16
    array_items: int = 1 << 18
    map_items: int = 1 << 12
    text_bytes: int = 8 << 20
    items: int = 1 << 21
    depth: int = 32


DEFAULT_LIMITS = CodecLimits()
# As large as its result: a client that refused one would be sent it again and again.
REPLY_LIMITS = CodecLimits(header_bytes=sys.maxsize, blob_bytes=sys.maxsize)


def encode_request(header: RequestHeader, blobs: Sequence[Frame] = ()) -> list[Frame]:
    return [MAGIC, _pack(header), *blobs]


def encode_reply(header: ReplyHeader, blobs: Sequence[Frame] = ()) -> list[Frame]:
    return [MAGIC, _pack(header), *blobs]


def decode_request(frames: Sequence[Frame], limits: CodecLimits = DEFAULT_LIMITS) -> tuple[RequestHeader, list[Frame]]:
    """Raises `ProtocolError` (malformed_message, message_too_large) whatever the bytes are."""
    _check_frames(frames, limits)
    native = _unpack(frames[1], limits)
    _check_values(native, limits.depth)
    try:
        return msgspec.convert(native, RequestHeader, builtin_types=(bytes,)), list(frames[2:])
    except msgspec.ValidationError as error:
        reason = str(error)
        raise _malformed(_clipped(reason) + allowed_values(reason, _command(native))) from None


def _clipped(reason: str) -> str:
    """The value that was refused is quoted in it, and may be megabytes long; the end says where it was."""
    return reason if len(reason) <= MAX_REASON else f"{reason[: MAX_REASON // 2]}...{reason[-MAX_REASON // 2 :]}"


def _command(native: Any) -> object:
    """The type of a request's body, which may be anything."""
    body = native.get("body") if isinstance(native, dict) else None
    return body.get("type") if isinstance(body, dict) else None


def decode_reply(frames: Sequence[Frame], limits: CodecLimits = REPLY_LIMITS) -> tuple[ReplyHeader, list[Frame]]:
    """Raises `ProtocolError` like `decode_request`; a reply may have any size unless `limits` are given."""
    _check_frames(frames, limits)
    try:
        return _reply_decoder.decode(frames[1]), list(frames[2:])
    # A recursion error is how a header nested without end is noticed.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(str(error)) from None


def salvage_request_id(frames: Sequence[Frame], limits: CodecLimits = DEFAULT_LIMITS) -> int:
    """The id in a header that is a map, so that the refusal of whatever is wrong with it can be matched; 0 without one.

    Where it stands behind something broken, or behind many other keys, it is not looked for.
    """
    if len(frames) < 2 or frames[0] != MAGIC:
        return 0
    try:
        request_id = _first_value(frames[1][: limits.header_bytes], "id")
    except (ValueError, OverflowError, msgpack.UnpackException):
        return 0
    return request_id if type(request_id) is int and 0 < request_id < 1 << 64 else 0


def _first_value(packed: Frame, wanted: str) -> Any:
    """Nothing is made of the values of other keys, so that no limit on them is needed."""
    unpacker = msgpack.Unpacker(
        raw=False, max_array_len=0, max_map_len=0, max_str_len=SALVAGED_TEXT_BYTES, max_buffer_size=len(packed) or 1
    )
    unpacker.feed(packed)
    for _ in range(min(unpacker.read_map_header(), SALVAGED_KEYS)):
        if unpacker.unpack() == wanted:
            return unpacker.unpack()
        unpacker.skip()
    return None


def _check_frames(frames: Sequence[Frame], limits: CodecLimits) -> None:
    if len(frames) < 2 or frames[0] != MAGIC:
        raise _malformed(f"expected an empty delimiter, then the frames {MAGIC!r}, header, blobs")
    if len(frames) - 2 > limits.blobs:
        raise _too_large(f"{len(frames) - 2} blobs, at most {limits.blobs}", limits.blobs)
    if len(frames[1]) > limits.header_bytes:
        raise _too_large(f"header of {len(frames[1])} bytes, at most {limits.header_bytes}", limits.header_bytes)
    if len(frames) == 2:
        return
    blob_bytes = sum(map(len, frames[2:]))
    if blob_bytes > limits.blob_bytes:
        raise _too_large(f"{blob_bytes} bytes of blobs, at most {limits.blob_bytes}", limits.blob_bytes)


def _unpack(packed: Frame, limits: CodecLimits) -> Any:
    list_hook, pairs_hook = _container_hooks(len(packed), limits.items)
    try:
        return msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=True,
            list_hook=list_hook,
            object_pairs_hook=pairs_hook,
            ext_hook=_refuse_extension,
            max_array_len=limits.array_items,
            max_map_len=limits.map_items,
            max_str_len=limits.text_bytes,
            max_bin_len=limits.text_bytes,
            max_ext_len=limits.text_bytes,
        )
    # msgpack reports every kind of bad input as a ValueError; a timestamp out of range is an OverflowError.
    except (ValueError, OverflowError, msgpack.UnpackException) as error:
        reason = error or type(error).__name__
        raise _malformed(f"header is not the message-pack this protocol uses: {reason}") from None


def _container_hooks(
    header_bytes: int, limit: int
) -> tuple[Callable[[list[Any]], list[Any]] | None, Callable[[list[tuple[Any, Any]]], dict[str, Any]]]:
    """An item takes a byte at least, so only what has more bytes than the limit must be counted."""
    if header_bytes <= limit:
        return None, _unique_map
    count = _item_counter(limit)
    return count, lambda pairs: _unique_map(count(pairs))


def _item_counter(limit: int) -> Callable[[list[Any]], list[Any]]:
    """Bounds memory: an item of one byte costs up to sixty once it is an object."""
    left = limit

    def count(container: list[Any]) -> list[Any]:
        nonlocal left
        left -= 1 + len(container)
        if left < 0:
            raise _too_large(f"more than {limit} items in one header", limit)
        return container

    return count


def _unique_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise _malformed("a map holds the same key twice")
    for key in unique:
        if type(key) is not str:
            raise _malformed("map keys must be strings")
    return unique


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise _malformed(f"message-pack extension type {code} is not used by this protocol")


def _check_values(native: Any, depth: int) -> None:
    """Refuses what JSON has no word for either, and nesting beyond `depth`."""
    level = [native]
    while level:
        if depth == 0:
            raise _malformed("header is nested too deeply")
        depth -= 1
        level = [child for container in level for child in _children(container) if _is_container(child)]


def _is_container(value: Any) -> bool:
    kind = type(value)
    if kind is float and not math.isfinite(value):
        raise _malformed(f"{value} is not a number this protocol uses")
    if kind is msgpack.Timestamp:
        raise _malformed("message-pack timestamps are not used by this protocol")
    return kind is dict or kind is list


def _children(container: Any) -> Iterable[Any]:
    if type(container) is dict:
        return container.values()
    return container if type(container) is list else ()


def _malformed(message: str) -> ProtocolError:
    return ProtocolError(ErrorCode.MALFORMED_MESSAGE, message)


def _too_large(message: str, limit: int) -> ProtocolError:
    return ProtocolError(ErrorCode.MESSAGE_TOO_LARGE, message, limit=limit)
