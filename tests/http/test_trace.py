"""Which weights made which tokens, choice by choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.http_trace import Trace, stamped_events


def test_spans_follow_the_tokens_that_are_told_of() -> None:
    """Chunks may be smaller or larger than engine steps, and may come after the version has changed."""
    trace = Trace()
    for count, version in ((1, 4), (2, 4), (1, 5), (3, 7)):
        trace.made(0, count, version)
    trace.made(1, 2, 7)
    assert trace.tell(0, 2) == [[4, 2]]
    assert trace.tell(0, 0) == []
    assert trace.tell(0, 3) == [[4, 1], [5, 1], [7, 1]]
    assert trace.tell(1, 2) == [[7, 2]]
    assert trace.tell(0, 2) == [[7, 2]]


def test_tokens_behind_a_stop_string_are_told_of_to_nobody() -> None:
    trace = Trace()
    trace.made(0, 5, 1)
    assert trace.tell(0, 3) == [[1, 3]]


def test_each_prompt_takes_its_choices_in_turn() -> None:
    trace = Trace()
    assert [trace.reserve(2), trace.reserve(2), trace.reserve(1)] == [0, 2, 4]


def events_of(trace: Trace, *events: str) -> list[str]:
    async def produce() -> AsyncGenerator[str, None]:
        for event in events:
            yield event

    async def collect() -> list[str]:
        return [event async for event in stamped_events(produce(), trace, lambda: {"max_tokens": 3})]

    return asyncio.run(collect())


def chunk(event: str) -> Any:
    return json.loads(event.removeprefix("data: "))


def test_only_the_first_event_reports_and_what_is_no_chunk_passes_unchanged() -> None:
    trace = Trace()
    trace.made(0, 2, 9)
    one = 'data: {"choices":[{"index":0,"token_ids":[5]}]}\n\n'
    usage = 'data: {"choices":[],"usage":{}}\n\n'
    first, second, third, keep_alive, done = events_of(trace, one, one, usage, ": keep-alive\n\n", "data: [DONE]\n\n")
    assert chunk(first)["refitd"] == {"max_tokens": 3}
    for event in (first, second):
        (choice,) = chunk(event)["choices"]
        assert (choice["weights_version"], choice["weights_versions"]) == (9, [[9, 1]])
    assert "refitd" not in chunk(second)
    assert chunk(third) == {"choices": [], "usage": {}}
    assert (keep_alive, done) == (": keep-alive\n\n", "data: [DONE]\n\n")


def test_an_error_in_a_stream_is_told_in_the_daemons_own_words() -> None:
    trace = Trace()
    trace.failure = ProtocolError(ErrorCode.TORN, "half of a refit came")
    (event,) = events_of(trace, 'data: {"error":{"message":"torn: half","type":"InternalServerError","code":500}}\n\n')
    error = chunk(event)["error"]
    assert (error["type"], error["code"], error["fault"]) == ("torn", 503, "engine")
