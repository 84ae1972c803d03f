"""What callers say beside their weights and prompts, refused in their own words before anything is sent.

What may be said is what the types say that the options, and the protocol's commands, are made of.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

import msgspec
from msgspec.inspect import (
    BoolType,
    DataclassType,
    DictType,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    NoneType,
    Type,
    UnionType,
    type_info,
)

from refit_protocol.messages import Request

_Request = TypeVar("_Request", bound=Request)

# Also without infinity, which is no number on the wire.
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Patience: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Deadline: TypeAlias = Annotated[float, msgspec.Meta(le=sys.float_info.max)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Version: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


def check_options(call: str, options: Mapping[str, Any], kind: type) -> None:
    """Raises TypeError for an option that `kind`, a typed dictionary, does not have or whose value is of another type,
    ValueError for a value that its type does not allow."""
    check_names(call, options, kind)
    for name, value in options.items():
        _check_value(name, value, _types(kind)[name])


def check_names(call: str, options: Mapping[str, Any], kind: type) -> None:
    """The same for names alone."""
    if unknown := sorted(options.keys() - _types(kind).keys()):
        raise TypeError(f"{call}() has no option {unknown[0]!r}; it has {', '.join(sorted(_types(kind)))}")


def checked(command: _Request) -> _Request:
    """The same for the fields of a command that were a caller's arguments."""
    fields: type = type(command)
    for name, kind in _types(fields).items():
        _check_value(name, getattr(command, name), kind)
    return command


def _check_value(name: str, value: Any, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        refusal = TypeError if ", got `" in str(error) else ValueError
        raise refusal(f"{name} is {reprlib.repr(value)}: it has to be {_any_of(_words(type_info(kind)))}") from None


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _words(kind: Type) -> list[str]:
    """What a value may be instead."""
    match kind:
        case UnionType(types=kinds):
            return [words for each in kinds for words in _words(each)]
        case LiteralType(values=values):
            return [repr(value) for value in values]
        case ListType(item_type=item):
            return [f"a list of {_any_of(_words(item))}"]
        case DictType(value_type=value):
            return [f"a dict of {_any_of(_words(value))}"]
        case DataclassType(cls=cls):
            return [cls.__name__]
        case FloatType() | IntType():
            return [_number(kind)]
    return [{BoolType: "True or False", NoneType: "None"}.get(type(kind), "text")]


def _any_of(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _number(kind: FloatType | IntType) -> str:
    noun = "a whole number" if isinstance(kind, IntType) else "a number"
    if kind.gt is not None:
        return f"{noun} above {kind.gt:g}"
    return noun if kind.ge is None else f"{noun} from {kind.ge:g} on"
