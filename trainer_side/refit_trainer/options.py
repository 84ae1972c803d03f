"""What callers say beside their weights and prompts, refused in their own words before anything is sent.

What may be said is what the types say that the options, and the protocol's commands, are made of.
"""

from __future__ import annotations

import math
import reprlib
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
    StrType,
    StructType,
    TupleType,
    Type,
    UnionType,
    type_info,
)

from refit_protocol.messages import Request, Sampling

_Said = TypeVar("_Said", bound=Request | Sampling)

Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Patience: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Version: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Names: TypeAlias = Annotated[list[str], msgspec.Meta(min_length=1)]


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


def checked(said: _Said) -> _Said:
    """The same for the fields of a command that were a caller's arguments, or of what a caller has made."""
    fields: type = type(said)
    values = msgspec.structs.asdict(said)
    # All at once: one by one takes six times as long, and of generations there are many.
    if _refusal(values, fields) is not None or not all(map(_is_number, values.values())):
        for name, kind in _types(fields).items():
            _check_value(name, values[name], kind)
    return said


def _check_value(name: str, value: Any, kind: Any) -> None:
    if (refusal := _refusal(value, kind)) is not None:
        raise refusal(f"{name} is {reprlib.repr(value)}: it has to be {_any_of(_words(type_info(kind)))}")


def _refusal(value: Any, kind: Any) -> type[TypeError | ValueError] | None:
    """None for what may be said."""
    if not _is_number(value):
        return ValueError
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return TypeError if ", got `" in str(error) else ValueError
    return None


def _is_number(value: Any) -> bool:
    """On the wire; so is whatever is no float."""
    return not isinstance(value, float) or math.isfinite(value)


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
        case ListType(item_type=item, min_length=least):
            return [f"a {'non-empty ' if least else ''}list of {_any_of(_words(item))}"]
        case DictType(value_type=value):
            return [f"a dict of {_any_of(_words(value))}"]
        case TupleType(item_types=items):
            return [f"({', '.join(_any_of(_words(item)) for item in items)})"]
        case DataclassType(cls=cls) | StructType(cls=cls):
            return [cls.__name__]
        case FloatType() | IntType():
            return [_number(kind)]
    return [{BoolType: "True or False", NoneType: "None", StrType: "text"}[type(kind)]]


def _any_of(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _number(kind: FloatType | IntType) -> str:
    noun = "a whole number" if isinstance(kind, IntType) else "a number"
    if kind.gt is not None:
        return f"{noun} above {kind.gt:g}"
    if kind.ge is None:
        return noun
    return f"{noun} from {kind.ge:g} {'on' if kind.le is None else f'to {kind.le}'}"
