"""The codec: round trips, and refusals whatever the bytes are."""

from __future__ import annotations

import contextlib

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_protocol.codec import (
    MAGIC,
    CodecLimits,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    salvage_request_id,
)
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    BeginRefit,
    CommitRefit,
    Failed,
    Generate,
    GetStatus,
    OpenSource,
    ReplyHeader,
    Request,
    RequestHeader,
    Sampling,
    Sleep,
    StructuredOutputs,
    TokenDelta,
    TokensGenerated,
    VersionRun,
    WakeUp,
)

U64 = st.integers(1, 2**64 - 1)
I63 = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | I63 | FINITE | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)
GENERATES = st.builds(
    Generate,
    prompt_lengths=st.lists(I63, max_size=5),
    texts=st.none() | st.lists(st.text(), max_size=3),
    sampling=st.builds(
        Sampling,
        temperature=FINITE,
        seed=st.none() | I63,
        stop=st.lists(st.text(), max_size=3),
        logit_bias=st.lists(st.tuples(I63, FINITE), max_size=3),
        structured=st.none()
        | st.builds(
            StructuredOutputs,
            json=st.none() | st.text() | st.dictionaries(st.text(max_size=5), JSON, max_size=3),
            choice=st.none() | st.lists(st.text(), max_size=3),
        ),
    ),
    deadline_seconds=st.none() | FINITE,
)
DELTAS = st.builds(
    TokenDelta,
    request=U64,
    prompt=I63,
    output=I63,
    position=I63,
    count=I63,
    versions=st.lists(st.builds(VersionRun, U64, I63), max_size=4),
    text=st.none() | st.text(),
    finish_reason=st.sampled_from([None, "stop", "length", "cancelled", "error"]),
    stop_reason=st.none() | I63 | st.text(),
)
BLOBS = st.lists(st.binary(max_size=20), max_size=4)


@given(st.builds(RequestHeader, id=U64, body=GENERATES, session=st.none() | st.text()), BLOBS)
def test_request_round_trip(header: RequestHeader, blobs: list[bytes]) -> None:
    assert decode_request(encode_request(header, blobs)) == (header, blobs)


@given(
    st.builds(
        ReplyHeader,
        id=U64,
        body=st.builds(TokensGenerated, deltas=st.lists(DELTAS, max_size=4)),
        last=st.booleans(),
    ),
    BLOBS,
)
def test_reply_round_trip(header: ReplyHeader, blobs: list[bytes]) -> None:
    assert decode_reply(encode_reply(header, blobs)) == (header, blobs)


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_arbitrary_frames_raise_nothing_but_protocol_errors(frames: list[bytes]) -> None:
    for candidate in (frames, [MAGIC, *frames]):
        for decode in (decode_request, decode_reply):
            with pytest.raises(ProtocolError):
                decode(candidate)
        assert salvage_request_id(candidate) >= 0


@given(JSON | st.binary(max_size=8))
@settings(max_examples=300)
def test_arbitrary_message_pack_raises_nothing_but_protocol_errors(native: object) -> None:
    """Well-formed message-pack that is no message."""
    for body in (native, {"id": 1, "body": native}, {"id": 1, "body": {"type": "Generate", "sampling": native}}):
        with contextlib.suppress(ProtocolError):
            decode_request([MAGIC, msgpack.packb(body)])


@given(st.data())
def test_one_flipped_byte_is_a_message_or_a_refusal(data: st.DataObject) -> None:
    frames = encode_request(RequestHeader(id=1, body=Generate(prompt_lengths=[1, 2]), session="s"))
    header = bytearray(frames[1])
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded, _ = decode_request([MAGIC, bytes(header)])
    except ProtocolError:
        return
    assert decode_request(encode_request(decoded))[0] == decoded


SMALL = CodecLimits(
    header_bytes=200, blob_bytes=10, blobs=2, array_items=8, map_items=8, text_bytes=16, items=40, depth=4
)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([MAGIC, b"\xc0" * 201], ErrorCode.MESSAGE_TOO_LARGE),
        ([MAGIC, b"\x80", b"x" * 6, b"x" * 5], ErrorCode.MESSAGE_TOO_LARGE),
        ([MAGIC, b"\x80", b"", b"", b""], ErrorCode.MESSAGE_TOO_LARGE),
        ([MAGIC, msgpack.packb(list(range(9)))], ErrorCode.MALFORMED_MESSAGE),
        ([MAGIC, msgpack.packb({str(i): i for i in range(9)})], ErrorCode.MALFORMED_MESSAGE),
        ([MAGIC, msgpack.packb("x" * 17)], ErrorCode.MALFORMED_MESSAGE),
        ([MAGIC, msgpack.packb([[0] * 8] * 5)], ErrorCode.MESSAGE_TOO_LARGE),
        ([MAGIC, msgpack.packb([[[[[]]]]])], ErrorCode.MALFORMED_MESSAGE),
    ],
)
def test_each_limit_is_kept(frames: list[bytes], code: ErrorCode) -> None:
    """And none is hit by a message within it."""
    assert decode_request(encode_request(RequestHeader(id=1, body=GetStatus())), SMALL)[0].id == 1
    with pytest.raises(ProtocolError) as refusal:
        decode_request(frames, SMALL)
    assert refusal.value.code is code


def test_refusal_can_be_matched_to_its_request() -> None:
    """The id is found even where the rest of the header makes no sense."""
    header = {"id": 9, "body": {"type": "Dance"}, "more": float("nan")}
    assert salvage_request_id([MAGIC, msgpack.packb(header)]) == 9
    for body in ({5: 1.0}, [0] * 9, [[[[[]]]]], "x" * 17, msgpack.ExtType(1, b"x"), msgpack.Timestamp(0, 0)):
        for broken in ({"id": 9, "body": body}, {"body": body, "id": 9}):
            assert salvage_request_id([MAGIC, msgpack.packb(broken)], SMALL) == 9
    for blobs in ([b"x" * 1000], [b""] * 100):
        assert salvage_request_id([MAGIC, msgpack.packb(header), *blobs], SMALL) == 9
    assert salvage_request_id([MAGIC, msgpack.packb({"id": 9, "body": "x" * 1000})], SMALL) == 9
    for hopeless in ({"id": "9"}, {"id": True}, {"id": 0}, {"id": -1}, [9], 9):
        assert salvage_request_id([MAGIC, msgpack.packb(hopeless)]) == 0
    for hopeless_bytes in (b"", b"\xc1", b"\x82\xa2id", b"\xdf\xff\xff\xff\xff\x01\x02", b"\x81" + b"\x91" * 100_000):
        assert salvage_request_id([MAGIC, hopeless_bytes]) == 0


def test_client_ignores_what_a_newer_daemon_adds() -> None:
    """Within version 1 facts may gain fields; commands may not, so that a misspelt option is not ignored."""
    fact = {
        "id": 1,
        "last": True,
        "body": {"type": "BucketApplied", "refit": 1, "bucket": 2, "size_bytes": 3, "new": 4},
    }
    assert decode_reply([MAGIC, msgpack.packb(fact)])[0].body.size_bytes == 3
    command = {"id": 1, "body": {"type": "GetStatus", "new": 4}}
    with pytest.raises(ProtocolError):
        decode_request([MAGIC, msgpack.packb(command)])


def test_memory_views_are_as_good_as_bytes() -> None:
    frames = [memoryview(bytes(frame)) for frame in encode_request(RequestHeader(id=1, body=GetStatus()), [b"blob"])]
    header, blobs = decode_request(frames)
    assert header.id == 1
    assert bytes(blobs[0]) == b"blob"


def test_failed_carries_what_the_error_says() -> None:
    error = ProtocolError(ErrorCode.LIMIT_EXCEEDED, "too much", limit=3)
    header, _ = decode_reply(encode_reply(ReplyHeader(id=1, body=Failed.from_error(error))))
    assert msgspec.to_builtins(header.body) == {
        "type": "Failed",
        "code": "limit_exceeded",
        "fault": "client",
        "message": "too much",
        "retryable": False,
        "details": {"limit": 3},
    }


def refused_with(body: Request) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode_request(encode_request(RequestHeader(id=1, body=body, session="s")))
    assert caught.value.code is ErrorCode.MALFORMED_MESSAGE
    return caught.value.message


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (CommitRefit(epoch=1, source=1, policy="soon"), "abort, finish, keep, recompute"),
        (OpenSource(epoch=1, kind="pipe", segments=[]), "bucket, inplace"),
        (Sleep(level=3), "1, 2"),
        (WakeUp(tags=["weights", "mind"]), "kv_cache, weights"),
        (BeginRefit(epoch=1, source=1, tensors=[{"name": "a", "dtype": "real", "shape": []}]), "bfloat16, bool, "),
    ],
)
def test_a_value_that_is_none_of_the_allowed_ones(body: Request, says: str) -> None:
    """The refusal names the field and lists what it may be, also inside lists and where the field may be null."""
    message = refused_with(body)
    assert "$.body." in message
    assert f"allowed are {says}" in message


def test_a_refused_value_is_not_sent_back_whole() -> None:
    """Megabytes of nonsense make a short answer, which still says where they stood."""
    message = refused_with(CommitRefit(epoch=1, source=1, policy="x" * 1_000_000))
    assert len(message) < 1000
    assert "$.body.policy" in message


def test_a_reply_may_have_any_size() -> None:
    """A result is as large as it is; a client that refused it would be sent it again with every connection."""
    large = bytes((256 << 20) + 1)
    assert (
        len(decode_reply(encode_reply(ReplyHeader(id=0, body=TokensGenerated(deltas=[])), [large]))[1][0]) > 256 << 20
    )
