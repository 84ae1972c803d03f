"""What a field allows, for the error about a value that it does not."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_args

import msgspec.inspect

from refit_protocol.messages import Request

_REFUSED_VALUE = re.compile(r"Invalid enum value .* at `\$\.body\.(?P<path>[^`]+)`", re.DOTALL)


def allowed_values(reason: str, command: object) -> str:
    """The words to add to msgspec's `reason` about a field of `command`; empty where it is about something else."""
    refused = _REFUSED_VALUE.match(reason)
    found = _commands().get(command) if isinstance(command, str) else None
    if refused is None or found is None:
        return ""
    values = {str(value) for kind in _at(found, refused["path"]) for value in _values(kind)}
    return f"; allowed are {', '.join(sorted(values))}"


@cache
def _commands() -> dict[str, msgspec.inspect.Type]:
    return {command.__struct_config__.tag: msgspec.inspect.type_info(command) for command in get_args(Request)}


def _at(kind: msgspec.inspect.Type, path: str) -> list[msgspec.inspect.Type]:
    """`tensors[...].dtype`: the types that may be there."""
    kinds = [kind]
    for name in re.sub(r"\[[^]]*\]", "", path).split("."):
        kinds = [field.type for kind in kinds for field in getattr(kind, "fields", ()) if field.encode_name == name]
        kinds = [inner for kind in kinds for inner in _inside(kind)]
    return kinds


def _inside(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """Without the lists and unions around it."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return [inner for each in kind.types for inner in _inside(each)]
    if isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
        return _inside(kind.item_type)
    return [kind]


def _values(kind: msgspec.inspect.Type) -> list[Any]:
    if isinstance(kind, msgspec.inspect.LiteralType):
        return list(kind.values)
    return [member.value for member in kind.cls] if isinstance(kind, msgspec.inspect.EnumType) else []
