"""Outputs that are cut off before their end, never taken for whole ones unless the caller asks; and cut budgets."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from refit_protocol.errors import ErrorCode, Fault
from refit_protocol.messages import (
    CancelGeneration,
    FinishReason,
    Generate,
    GenerationStarted,
    TokenDelta,
    TokensGenerated,
    VersionRun,
)
from refit_trainer import AsyncDaemon, Daemon, OutputIncomplete
from tests.trainer.background import in_background
from tests.trainer.peer import FINISHED, RESOLVED, Asked, Peer, begin_stream

PROMPTS = [[1], [2], [3], [4]]


def end(asked: Asked, *ends: tuple[int, FinishReason, ErrorCode | None]) -> None:
    """One message, with one token and the end of the output of each of these prompts."""
    deltas = [
        TokenDelta(
            request=asked.id,
            prompt=prompt,
            output=0,
            position=0,
            count=1,
            versions=[VersionRun(3, 1)],
            finish_reason=reason,
            error=error,
        )
        for prompt, reason, error in ends
    ]
    blobs = [np.zeros(len(ends), "<i4").tobytes(), np.zeros(len(ends), "<f4").tobytes()]
    asked.reply(TokensGenerated(deltas=deltas), blobs=blobs, last=False, id=0)


def end_all(asked: Asked) -> None:
    end(
        asked,
        (0, "length", None),
        (1, "cancelled", ErrorCode.ABORTED),
        (2, "error", ErrorCode.NOT_A_NUMBER),
        (3, "stop", None),
    )
    asked.reply(FINISHED)


def test_what_is_whole_comes_before_the_error(peer: Peer, client: Daemon) -> None:
    """The error names the first output that was cut off and holds all of them; the iterator is then at its end."""
    samples = client.generate(PROMPTS)
    end_all(begin_stream(peer.next(Generate)))
    assert [(sample.prompt, sample.complete) for sample in (next(samples), next(samples))] == [(0, True), (3, True)]
    with pytest.raises(OutputIncomplete, match="output 0 of prompt 1 and 1 more") as raised:
        next(samples)
    error = raised.value
    assert (error.code, error.fault, error.retryable) == (ErrorCode.ABORTED, Fault.CLIENT, True)
    assert error.details == {"prompt": 1, "output": 0, "finish_reason": "cancelled"}
    assert [(sample.prompt, len(sample.token_ids)) for sample in error.samples] == [(1, 1), (2, 1)]
    assert list(samples) == []


def test_the_rest_of_the_batch_is_given_up(peer: Peer, client: Daemon) -> None:
    """Nobody reads it any more: the engine is not kept busy."""
    samples = client.generate(PROMPTS)
    asked = begin_stream(peer.next(Generate))
    end(asked, (2, "error", ErrorCode.ENGINE_ERROR))
    with pytest.raises(OutputIncomplete, match=r"^engine_error: output 0 of prompt 2 ended"):
        next(samples)
    assert peer.next(CancelGeneration).body.request == asked.id


def test_a_stream_yields_the_last_tokens_first(peer: Peer, client: Daemon) -> None:
    """They are the model's; the end that says so is yielded too."""
    deltas = client.stream(PROMPTS)
    end_all(begin_stream(peer.next(Generate)))
    assert [next(deltas).finish_reason for _ in PROMPTS] == ["length", "cancelled", "error", "stop"]
    with pytest.raises(OutputIncomplete) as raised:
        next(deltas)
    assert (raised.value.code, raised.value.samples) == (ErrorCode.ABORTED, ())


def test_they_come_like_others_where_that_is_asked_for(peer: Peer, client: Daemon) -> None:
    """In the order of their ends, each with its reason; the option is the client's own and not sent."""
    samples = client.generate(PROMPTS, incomplete="yield")
    end_all(begin_stream(peer.next(Generate)))
    got = [(sample.prompt, sample.complete, sample.error) for sample in samples]
    assert got == [
        (0, True, None),
        (1, False, ErrorCode.ABORTED),
        (2, False, ErrorCode.NOT_A_NUMBER),
        (3, True, None),
    ]
    assert samples.finished == FINISHED


def test_what_the_caller_cancelled_comes_without_an_error(peer: Peer, client: Daemon) -> None:
    """It knows; that these are no whole outputs can be asked all the same."""
    samples = client.generate(PROMPTS[:1])
    asked = begin_stream(peer.next(Generate))
    end(asked, (0, "cancelled", None))
    asked.reply(FINISHED)
    assert [sample.complete for sample in samples] == [False]


def test_one_sample_is_whole_or_an_error(peer: Peer, client: Daemon) -> None:
    thread, outcome = in_background(_one, client)
    end(begin_stream(peer.next(Generate)), (0, "cancelled", ErrorCode.DEADLINE_EXCEEDED))
    thread.join()
    assert outcome == [ErrorCode.DEADLINE_EXCEEDED]


def _one(client: Daemon) -> ErrorCode | None:
    with pytest.raises(OutputIncomplete) as raised:
        client.generate_one([1])
    return raised.value.code


def test_tasks_are_told_as_threads_are(peer: Peer) -> None:
    async def read() -> list[int]:
        async with AsyncDaemon.connect(peer.endpoint) as daemon:
            samples = daemon.generate(PROMPTS)
            whole = [(await anext(samples)).prompt, (await anext(samples)).prompt]
            with pytest.raises(OutputIncomplete):
                await anext(samples)
            assert [sample async for sample in samples] == []
            return whole

    thread, outcome = in_background(asyncio.run, read())
    end_all(begin_stream(peer.next(Generate)))
    thread.join()
    assert outcome == [[0, 3]]


def test_an_option_that_there_is_not_is_refused(client: Daemon) -> None:
    with pytest.raises(ValueError, match="incomplete is 'drop'"):
        client.generate(PROMPTS, incomplete="drop")  # type: ignore[arg-type]


def test_a_request_has_the_deadline_that_it_names(peer: Peer, client: Daemon) -> None:
    """Without one it has the daemon's, if that has any."""
    with client.generate(PROMPTS), client.generate(PROMPTS, deadline_seconds=7.0):
        assert peer.next(Generate).body.deadline_seconds is None
        assert peer.next(Generate).body.deadline_seconds == 7.0


@pytest.mark.parametrize("clamped", [True, False])
def test_a_sample_says_that_its_budget_was_cut(peer: Peer, client: Daemon, *, clamped: bool) -> None:
    """`max_tokens` was more than its own prompt had left room for: `length` is then the context's end."""
    samples = client.generate(PROMPTS[:2])
    asked = peer.next(Generate)
    resolved = msgspec.structs.replace(RESOLVED, max_tokens=[9, 9], clamped=[False, clamped])
    asked.reply(GenerationStarted(resolved=resolved, prompt_lengths=[1, 1]), last=False)
    end(asked, (0, "length", None), (1, "length", None))
    assert [next(samples).clamped for _ in range(2)] == [False, clamped]
