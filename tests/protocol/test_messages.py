"""Rules that every message keeps, so that version 1 can grow without breaking anybody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from refit_protocol.messages import Command, Fact, Reply, Request

COMMANDS, FACTS = get_args(Request), get_args(Reply)


@pytest.mark.parametrize("kind", COMMANDS)
def test_commands_refuse_unknown_fields(kind: type[Command]) -> None:
    """At every depth: a misspelt option must not be ignored."""
    for part in structs_in(kind):
        assert part.__struct_config__.forbid_unknown_fields or part.__struct_config__.array_like, part


@pytest.mark.parametrize("kind", FACTS)
def test_facts_ignore_unknown_fields(kind: type[Fact]) -> None:
    """A daemon of tomorrow may say more to a client of today."""
    assert not kind.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize("kind", [*COMMANDS, *FACTS])
def test_messages_are_frozen_and_tagged_by_their_name(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.tag == kind.__name__
    assert kind.__struct_config__.tag_field == "type"


def test_unions_hold_every_message() -> None:
    assert set(COMMANDS) == set(Command.__subclasses__())
    assert set(FACTS) == set(Fact.__subclasses__())


def structs_in(kind: type[msgspec.Struct]) -> Iterator[Any]:
    inspect = msgspec.inspect

    def walk(part: Any) -> Iterator[Any]:
        if isinstance(part, inspect.StructType):
            yield part.cls
            for field in part.fields:
                yield from walk(field.type)
        elif isinstance(part, inspect.UnionType):
            for choice in part.types:
                yield from walk(choice)
        elif isinstance(part, inspect.ListType | inspect.VarTupleType):
            yield from walk(part.item_type)

    return walk(inspect.type_info(kind))
