"""What JSON is made of, and what of it is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd import http_json
from refitd.http_json import Shape, check_json, shape_of


def refusal(body: bytes) -> ErrorCode:
    with pytest.raises(ProtocolError) as refused:
        check_json(body)
    return refused.value.code


@pytest.mark.parametrize("body", [json.dumps("[" * 1000), json.dumps('\\"[' * 1000), json.dumps([[]] * 1000)])
def test_brackets_in_strings_and_beside_each_other_are_not_depth(body: str) -> None:
    check_json(body.encode())


def test_the_shape_of_megabytes_of_quotes_is_found_in_linear_time() -> None:
    """A string that never ends must not be scanned again from each of its quotes: that would take hours."""
    check_json(b'"' + b'\\"' * 2_000_000)
    check_json(b'"\\' * 2_000_000)
    assert refusal(b'"a\\"[" ' * 500_000 + b"[" * 101) is ErrorCode.MALFORMED_MESSAGE


def test_many_containers_and_many_values_are_too_much() -> None:
    """A parser makes an object of each; in one text there may be as many as the body may have bytes."""
    assert refusal(b"[" + b"{}," * http_json.MAX_CONTAINERS + b"1]") is ErrorCode.MESSAGE_TOO_LARGE
    assert refusal(b"[" + b"1," * http_json.MAX_VALUES + b"1]") is ErrorCode.MESSAGE_TOO_LARGE
    check_json(json.dumps(["{}," * http_json.MAX_VALUES]).encode())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_refused(encoding: str) -> None:
    """Parsers read them, and brackets could hide there: what looks like a quote is a half of another character."""
    assert refusal(('["\u2230"' + "[" * 1000).encode(encoding)) is ErrorCode.MALFORMED_MESSAGE


def read(body: bytes) -> Shape:
    """Byte by byte."""
    level = deepest = containers = commas = 0
    in_string = escaped = False
    for byte in body:
        if byte == ord('"'):
            in_string ^= not escaped
        elif not in_string:
            level += (byte in b"[{") - (byte in b"]}")
            containers += byte in b"[{"
            commas += byte == ord(",")
            deepest = max(deepest, level)
        escaped = byte == ord("\\") and not escaped
    return Shape(deepest, containers, containers + commas)


@given(st.lists(st.sampled_from(b'"\\[]{},a')).map(bytes))
@example(b'"\\\\"[[[')
@example(b'"aa\\"[[[')
def test_the_shape_is_that_of_a_reader_byte_by_byte(body: bytes) -> None:
    """Wherever a body is cut into chunks: also between a backslash and what it escapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_json, "CHUNK_BYTES", 3)
        assert shape_of(body) == read(body)
