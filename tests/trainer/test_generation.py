"""Samples and streams as a client hands them out, from a peer that sends the tokens it is told to."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AcknowledgeGeneration,
    CancelGeneration,
    Generate,
    GenerationForgotten,
    GenerationResumed,
    ResumeGeneration,
    Sampling,
    StreamCursor,
    TokenDelta,
    TokensGenerated,
    VersionRun,
)
from refit_trainer import AsyncDaemon, Daemon, RefitdError, RequestTimedOut
from tests.trainer.background import in_background
from tests.trainer.peer import FINISHED, RESOLVED, Peer, begin_stream, send_tokens


def test_samples_come_as_they_are_finished(peer: Peer, client: Daemon) -> None:
    """Ids, logprobs and versions of all deltas are joined, then acknowledged."""
    samples = client.generate([[1, 2]], Sampling(max_tokens=4))
    asked = begin_stream(peer.next(Generate))
    assert np.frombuffer(asked.blobs[0], "<i4").tolist() == [1, 2]
    send_tokens(asked, 0, [10])
    send_tokens(asked, 1, [11, 12], last=True)
    sample = next(samples)
    asked.reply(FINISHED)
    assert list(samples) == []
    assert sample.token_ids.tolist() == [10, 11, 12]
    assert sample.logprobs.tolist() == [-0.5] * 3
    assert (sample.version, sample.finish_reason) == (3, "length")
    assert samples.resolved == RESOLVED
    acknowledged = peer.next(AcknowledgeGeneration)
    assert acknowledged.body.requests == [asked.id]
    acknowledged.reply(GenerationForgotten(requests=[asked.id]))


@pytest.mark.parametrize("leave", ["close", "drop", "with"])
def test_left_iterator_cancels_the_generation(peer: Peer, client: Daemon, leave: str) -> None:
    """Whoever stops reading does not keep the engine busy."""
    deltas = client.stream([[1, 2]])
    asked = begin_stream(peer.next(Generate))
    if leave == "close":
        deltas.close()
    elif leave == "with":
        with deltas:
            pass
    else:
        del deltas
    assert peer.next(CancelGeneration).body.request == asked.id


def test_refused_generation_raises_once(peer: Peer, client: Daemon) -> None:
    """A refused generation raises the daemon's error, once; then the iterator is at its end."""
    deltas = client.stream([[1, 2]])
    peer.next(Generate).fail(ErrorCode.INVALID_PROMPT)
    with pytest.raises(RefitdError) as caught:
        next(deltas)
    assert caught.value.code is ErrorCode.INVALID_PROMPT
    assert list(deltas) == []


def test_missing_tokens_are_asked_for(peer: Peer, client: Daemon) -> None:
    """A gap in an output is never a shorter sample: the daemon is told how far it has come."""
    deltas = client.stream([[1, 2]])
    asked = begin_stream(peer.next(Generate))
    send_tokens(asked, 0, [10])
    send_tokens(asked, 2, [12])
    resumed = peer.next(ResumeGeneration)
    assert resumed.body == ResumeGeneration(request=asked.id, cursors=[StreamCursor(prompt=0, output=0, position=1)])
    send_tokens(asked, 1, [11, 12], last=True)
    resumed.reply(GenerationResumed(request=asked.id, finished=False))
    asked.reply(FINISHED)
    assert [delta.token_ids.tolist() for delta in deltas] == [[10], [11, 12]]


def test_an_end_without_its_tokens_is_an_error(peer: Peer, client: Daemon) -> None:
    """A daemon that says that all has come, where it has not, is not waited for."""
    deltas = client.stream([[1, 2]])
    asked = begin_stream(peer.next(Generate))
    send_tokens(asked, 1, [11], last=True)
    asked.reply(FINISHED)
    peer.next(ResumeGeneration).reply(GenerationResumed(request=asked.id, finished=True))
    with pytest.raises(RefitdError, match="broke the protocol"):
        next(deltas)


def test_stream_waits_no_longer_than_its_deadline(peer: Peer, client: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon is told the deadline; should it not keep it, we do."""
    monkeypatch.setattr("refit_trainer.replies.GRACE_SECONDS", 0.0)
    deltas = client.stream([[1, 2]], deadline_seconds=0.2)
    asked = begin_stream(peer.next(Generate))
    assert asked.body.deadline_seconds == 0.2
    with pytest.raises(RequestTimedOut):
        next(deltas)
    assert peer.next(CancelGeneration).body.request == asked.id


def test_one_message_feeds_many_streams(peer: Peer, client: Daemon) -> None:
    """Deltas of several requests in one message find their own iterators."""
    streams = [client.stream([[index]]) for index in range(8)]
    asked = [begin_stream(peer.next(Generate)) for _ in streams]
    deltas = [
        TokenDelta(request=one.id, prompt=0, output=0, position=0, count=2, versions=[VersionRun(3, 2)])
        for one in asked
    ]
    token_ids = np.arange(16, dtype="<i4")
    blobs = [token_ids.tobytes(), (-token_ids.astype("<f4")).tobytes()]
    asked[0].reply(TokensGenerated(deltas=deltas), blobs=blobs, last=False, id=0)
    for index, stream in enumerate(streams):
        delta = next(stream)
        assert delta.token_ids.tolist() == [2 * index, 2 * index + 1]
        assert delta.logprobs.tolist() == [-2.0 * index, -2.0 * index - 1]


def test_async_stream_is_iterated_and_cancelled(peer: Peer) -> None:
    """The asynchronous iterator sends when it is first advanced, and cancels what it is left with."""

    async def read() -> list[int]:
        async with AsyncDaemon.connect(peer.endpoint) as daemon, daemon.stream([[1, 2]]) as deltas:
            return (await anext(deltas)).token_ids.tolist()

    thread, outcome = in_background(asyncio.run, read())
    asked = begin_stream(peer.next(Generate))
    send_tokens(asked, 0, [10])
    assert peer.next(CancelGeneration).body.request == asked.id
    thread.join()
    assert outcome == [[10]]
