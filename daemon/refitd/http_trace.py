"""What one HTTP request made, choice by choice: which weights made which tokens, and how its answers say so."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from refit_protocol.errors import ProtocolError
from refitd.http_errors import error_body

DATA = "data: "


class Trace:
    """Lives as long as its request. Spans are `[version, count]`, in the order of the tokens."""

    def __init__(self) -> None:
        self.spans: dict[int, list[list[int]]] = {}
        self.failure: ProtocolError | None = None
        self._choices = 0
        self._told: dict[int, int] = {}

    def reserve(self, count: int) -> int:
        """The first of `count` new choices: a prompt's samples follow those of the prompt before."""
        first = self._choices
        self._choices += count
        return first

    def made(self, choice: int, count: int, version: int) -> None:
        """`count` more tokens of `choice`, made by weights `version`."""
        spans = self.spans.setdefault(choice, [])
        if spans and spans[-1][0] == version:
            spans[-1][1] += count
        else:
            spans.append([version, count])

    def tell(self, choice: int, count: int) -> list[list[int]]:
        """The spans of the next `count` tokens of `choice`: those that its answer, or this chunk of it, carries."""
        start = self._told.get(choice, 0)
        self._told[choice] = start + count
        return _cut(self.spans.get(choice, []), start, start + count)


def _cut(spans: list[list[int]], start: int, end: int) -> list[list[int]]:
    cut, position = [], 0
    for version, count in spans:
        inside = min(end, position + count) - max(start, position)
        if inside > 0:
            cut.append([version, inside])
        position += count
    return cut


def stamp_response(response: Any, trace: Trace, report: dict[str, object]) -> None:
    """Adds to a whole answer what vLLM's does not have: versions, and in chat the ids in the message itself.

    A client that sends the message back as it came so carries the exact tokens of the turn.
    """
    for choice in response.choices:
        spans = trace.tell(choice.index, len(choice.token_ids or ()))
        choice.weights_version = spans[-1][0] if spans else None
        choice.weights_versions = spans
        message = getattr(choice, "message", None)
        if message is not None and choice.token_ids is not None:
            message.prompt_token_ids = response.prompt_token_ids
            message.generation_token_ids = choice.token_ids
    response.refitd = report


async def stamped_events(
    events: AsyncGenerator[str, None], trace: Trace, report: Callable[[], dict[str, object]]
) -> AsyncIterator[str]:
    """The same server-sent events with each choice's versions; the first one also has the report."""
    first = True
    async with aclosing(events):
        async for event in events:
            if not event.startswith(DATA + "{"):
                yield event
                continue
            chunk = msgspec.json.decode(event[len(DATA) :])
            if "error" in chunk and trace.failure is not None:
                chunk = error_body(trace.failure)
            for choice in chunk.get("choices", ()):
                _stamp_choice(choice, trace)
            if first:
                chunk["refitd"] = report()
                first = False
            yield f"{DATA}{msgspec.json.encode(chunk).decode()}\n\n"


def _stamp_choice(choice: dict[str, Any], trace: Trace) -> None:
    spans = trace.tell(choice["index"], len(choice.get("token_ids") or ()))
    if spans:
        choice["weights_version"] = spans[-1][0]
        choice["weights_versions"] = spans
