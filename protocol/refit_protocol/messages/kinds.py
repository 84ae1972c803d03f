"""The four kinds of structs that messages are made of, and the words that several rooms use."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "PROTOCOL_VERSION",
    "AttestMode",
    "Command",
    "Detail",
    "Fact",
    "FinishReason",
    "InflightPolicy",
    "PlanMode",
    "Record",
    "RefitPath",
    "SleepTag",
]

PROTOCOL_VERSION = 1
InflightPolicy = Literal["finish", "keep", "recompute", "abort"]
AttestMode = Literal["off", "sampled", "full"]
PlanMode = Literal["auto", "off", "require"]
RefitPath = Literal["plan", "loader", "mixed"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
SleepTag = Literal["weights", "kv_cache"]


class Command(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag=True,
    tag_field="type",
):
    """From client to daemon. Unknown fields are refused: a misspelt option must not be ignored."""


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, tag_field="type"):
    """From daemon to client. Unknown fields are ignored: the daemon may say more within version 1."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a command."""


class Detail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a fact."""
