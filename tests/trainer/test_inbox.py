"""What arrives, sorted to whoever waits for it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np

from refit_protocol.messages import (
    Generate,
    GenerationFinished,
    GenerationStarted,
    ReplyHeader,
    ResolvedSampling,
    TokenDelta,
    TokensGenerated,
    VersionRun,
)
from refit_trainer.errors import DaemonUnreachable
from refit_trainer.inbox import Arrival, Generation, Inbox

RESOLVED = ResolvedSampling(max_tokens=[8], clamped=[False], stop_token_ids=[], logprobs_mode="raw_logprobs")


class Taken:
    def __init__(self) -> None:
        self.arrived: list[Arrival] = []

    def put(self, arrival: Arrival) -> None:
        self.arrived.append(arrival)


def send(
    inbox: Inbox, request: int, position: int, tokens: list[int], *, last: bool = False, text: str | None = None
) -> None:
    delta = TokenDelta(
        request=request,
        prompt=0,
        output=0,
        position=position,
        count=len(tokens),
        versions=[VersionRun(1, len(tokens))],
        text=text,
        finish_reason="length" if last else None,
    )
    blobs = [np.array(tokens, "<i4").tobytes(), np.zeros(len(tokens), "<f4").tobytes()]
    inbox.deliver(ReplyHeader(id=0, body=TokensGenerated(deltas=[delta]), last=False), blobs)


def finish(inbox: Inbox, request: int) -> None:
    finished = GenerationFinished(
        deltas=[],
        outputs=1,
        prompt_tokens=1,
        generated_tokens=3,
        resolved=RESOLVED,
        first_token_milliseconds=1.0,
        total_milliseconds=2.0,
    )
    inbox.deliver(ReplyHeader(id=request, body=finished), [])


def test_an_end_that_comes_again_is_not_handed_on() -> None:
    """After a reconnect the daemon says again that an output has ended; its consumer has heard it."""
    inbox, taken = Inbox(), Taken()
    request = inbox.expect_generation(Generation(Generate(), [], taken))
    send(inbox, request, 0, [5, 6])
    send(inbox, request, 2, [7], last=True)
    send(inbox, request, 3, [], last=True)
    assert [delta.token_ids.tolist() for (delta,) in taken.arrived] == [[5, 6], [7]]


def test_tokens_behind_a_gap_are_asked_for_and_its_end_waits_for_them() -> None:
    """Never a shorter sample, and no error: they come again, as does the end."""
    inbox, taken = Inbox(), Taken()
    generation = Generation(Generate(), [], taken)
    request = inbox.expect_generation(generation)
    send(inbox, request, 0, [5])
    send(inbox, request, 2, [7], last=True)
    finish(inbox, request)
    assert (inbox.gaps, request in inbox.generations) == ({request}, True)
    (cursor,) = generation.resume()
    assert cursor.position == 1
    send(inbox, request, 1, [6, 7], last=True)
    finish(inbox, request)
    *deltas, finished = taken.arrived
    assert [delta.token_ids.tolist() for (delta,) in deltas] == [[5], [6, 7]]
    assert isinstance(finished, GenerationFinished)


def test_tokens_that_come_again_are_cut_off() -> None:
    """A step came between the cursor and the daemon's going back to it: ids, text and versions go on unbroken."""
    inbox, taken = Inbox(), Taken()
    generation = Generation(Generate(), [], taken)
    request = inbox.expect_generation(generation)
    send(inbox, request, 0, [5, 6], text="ab")
    generation.resume()
    send(inbox, request, 2, [7], text="cd")
    send(inbox, request, 2, [7], text="cd")
    send(inbox, request, 2, [7, 8, 9], text="cdef", last=True)
    deltas = [delta for (delta,) in taken.arrived]
    assert [(delta.position, delta.token_ids.tolist(), delta.text) for delta in deltas] == [
        (0, [5, 6], "ab"),
        (2, [7], "cd"),
        (3, [8, 9], "ef"),
    ]
    assert deltas[-1].versions == [VersionRun(1, 2)]
    assert deltas[-1].finish_reason == "length"


def test_a_stream_that_starts_again_says_so_once() -> None:
    """As when it was resumed before its first token."""
    inbox, taken = Inbox(), Taken()
    request = inbox.expect_generation(Generation(Generate(), [], taken))
    started = GenerationStarted(resolved=RESOLVED, prompt_lengths=[2])
    for _ in range(2):
        inbox.deliver(ReplyHeader(id=request, body=started, last=False), [])
    assert taken.arrived == [started]


def test_an_answer_that_nobody_waits_for_fails_in_silence() -> None:
    """As where the connection broke while the request was being sent, and its sender raises that."""

    async def scene() -> list[dict[str, Any]]:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, complaint: complaints.append(complaint))
        inbox = Inbox()
        inbox.expect_answer()
        inbox.fail_answers(DaemonUnreachable("gone"))
        await asyncio.sleep(0)
        gc.collect()
        return complaints

    assert asyncio.run(scene()) == []
