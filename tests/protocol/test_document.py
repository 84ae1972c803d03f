"""docs/protocol.md names everything that exists, and its tables are those of the code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from refit_protocol.codec import DEFAULT_LIMITS
from refit_protocol.errors import ERROR_RULES, ErrorCode
from refit_protocol.messages import Reply, Request
from refit_protocol.states import (
    ENGINE_TRANSITIONS,
    GROUP_TRANSITIONS,
    NOT_SERVABLE,
    SESSION_TRANSITIONS,
    SLEEP_TRANSITIONS,
    WRITER_TRANSITIONS,
)
from refitd.config import ServerConfig

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()


@pytest.mark.parametrize("kind", [*get_args(Request), *get_args(Reply)])
def test_every_message_and_field_is_described(kind: type[msgspec.Struct]) -> None:
    assert re.search(rf"\b{kind.__name__}\b", DOCUMENT)
    for field in fields_in(msgspec.inspect.type_info(kind)):
        assert f"`{field}`" in DOCUMENT, field


def fields_in(kind: Any) -> set[str]:
    inspect = msgspec.inspect
    if isinstance(kind, inspect.StructType):
        own = set() if kind.array_like else {field.name for field in kind.fields}
        return own.union(*(fields_in(field.type) for field in kind.fields))
    if isinstance(kind, inspect.UnionType):
        return set().union(*map(fields_in, kind.types))
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return fields_in(kind.item_type)
    return set()


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_code_is_listed_with_its_fault_and_retry(code: ErrorCode) -> None:
    rule = ERROR_RULES[code]
    assert re.search(
        rf"^\| `{code.value}` \| {rule.fault.value} \| {'yes' if rule.retryable else 'no'} \|", DOCUMENT, re.M
    )


@pytest.mark.parametrize(
    "table", [ENGINE_TRANSITIONS, SESSION_TRANSITIONS, WRITER_TRANSITIONS, SLEEP_TRANSITIONS, GROUP_TRANSITIONS]
)
def test_every_transition_is_listed(table: Mapping[tuple[StrEnum, StrEnum], StrEnum]) -> None:
    for (before, event), after in table.items():
        assert f"| {before.value} | {event.value} | {after.value} |" in DOCUMENT


def test_every_refusing_state_is_named_with_its_code() -> None:
    for state, (code, _) in NOT_SERVABLE.items():
        assert f"`{state.value}` with `{code.value}`" in DOCUMENT


def test_limits_are_the_defaults_of_the_code() -> None:
    limits, server = DEFAULT_LIMITS, ServerConfig()
    assert f"| {limits.array_items:,}; {limits.map_items:,} |" in DOCUMENT
    assert f"| {limits.items:,} |" in DOCUMENT
    assert f"| nesting | {limits.depth} |" in DOCUMENT
    assert f"| blobs in a message | {limits.blobs} |" in DOCUMENT
    assert f"| {server.max_bucket_pieces:,} |" in DOCUMENT
    for setting in ServerConfig.model_fields:
        if setting.startswith("max_"):
            assert f"`{setting}`" in DOCUMENT, setting
