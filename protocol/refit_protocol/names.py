"""What names of tensors have in common: the usual mistake is one word too many in front of all of them."""

from __future__ import annotations

from collections.abc import Collection


def added_prefix(given: Collection[str], missing: Collection[str]) -> str | None:
    """What stands in front of every missing name among those given, such as `policy.`; None where nothing does.

    More names than these may be given, a value head's for one.
    """
    if not missing:
        return None
    names, first = set(given), next(iter(missing))
    prefixes = [name.removesuffix(first) for name in given if name.endswith(f".{first}")]
    return next((prefix for prefix in prefixes if all(prefix + name in names for name in missing)), None)


def prefix_advice(prefix: str | None) -> str:
    """The end of a refusal's message; empty without a prefix."""
    if prefix is None:
        return ""
    return f"; all are there behind {prefix!r}: pass the module inside, model.{prefix.removesuffix('.')}"
