"""Streams of the real client from a daemon that goes on generating while connections break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from refit_protocol.messages import Hello, Sampling
from refit_trainer import Daemon
from refitd.sessions import Answer, Call
from tests.server.small_daemon import SmallDaemon, small_daemon
from tests.trainer.wire import Wire, wire_to

TOKENS = 40


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    with small_daemon(tmp_path) as running:
        yield running


@pytest.fixture
def wire(daemon: SmallDaemon, tmp_path: Path) -> Iterator[Wire]:
    with wire_to(daemon, tmp_path / "wire") as between:
        yield between


@pytest.fixture
def client(wire: Wire) -> Iterator[Daemon]:
    with Daemon.connect(wire.endpoint) as connected:
        yield connected


def step_upon_resume(daemon: SmallDaemon) -> None:
    """The engine steps just after the session was taken up again, before any stream can have been."""
    handlers = daemon.server._instant
    hello = handlers[Hello]

    def hello_then_step(call: Call) -> Answer:
        daemon.loop.call_soon(daemon.engine.step)
        return hello(call)

    handlers[Hello] = hello_then_step  # type: ignore[index]


def test_streams_go_on_while_the_engine_steps(daemon: SmallDaemon, wire: Wire, client: Daemon) -> None:
    """Steps before, while and just after the connection is gone: no token is missing, and none comes twice."""
    streams = [client.stream([[1, 2]], Sampling(max_tokens=TOKENS)) for _ in range(8)]
    daemon.until(lambda: len(daemon.engine.running) == len(streams))
    step_upon_resume(daemon)
    daemon.step(2)
    tokens = [next(stream).token_ids.tolist() for stream in streams]
    for _ in range(3):
        daemon.step()
        wire.cut()
        daemon.step(2)
        daemon.until(lambda: next(iter(daemon.sessions)).connected)
        daemon.step()
    daemon.step(TOKENS)
    for got, stream in zip(tokens, streams, strict=True):
        got += [token for delta in stream for token in delta.token_ids.tolist()]
        assert got == [*range(TOKENS)]


def test_a_stream_that_ends_just_after_the_reconnect_comes_whole(
    daemon: SmallDaemon, wire: Wire, client: Daemon
) -> None:
    """Its end is not said before its tokens have been sent again, however it ended; nothing of it is kept after."""
    samples = client.generate([[1, 2]] * 3, Sampling(max_tokens=4))
    daemon.until(lambda: len(daemon.engine.running) == 3)
    daemon.step()
    step_upon_resume(daemon)
    wire.cut()
    daemon.step(2)
    assert [sample.token_ids.tolist() for sample in samples] == [[0, 1, 2, 3]] * 3
    assert samples.resolved is not None
    session = next(iter(daemon.sessions))
    daemon.until(lambda: not daemon.generation._jobs_of(session))


def test_a_stream_left_while_the_connection_is_gone_leaves_the_engine(
    daemon: SmallDaemon, wire: Wire, client: Daemon
) -> None:
    """Its results are not kept for anybody either."""
    left, kept = (client.stream([[1, 2]], Sampling(max_tokens=TOKENS)) for _ in range(2))
    daemon.until(lambda: len(daemon.engine.running) == 2)
    wire.cut()
    left.close()
    session = next(iter(daemon.sessions))
    daemon.until(lambda: len(daemon.engine.running) == 1 and len(daemon.generation._jobs_of(session)) == 1)
    daemon.step(TOKENS)
    assert [token for delta in kept for token in delta.token_ids.tolist()] == [*range(TOKENS)]


def test_what_was_missed_comes_in_messages_of_bounded_size(
    daemon: SmallDaemon, wire: Wire, client: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole outputs, as many as fit: nobody has to hold everything at once."""
    sizes: list[int] = []
    send = daemon.generation.send

    def measured(identity: bytes, request: int, answer: Answer) -> None:
        sizes.append(sum(map(len, answer.blobs)))
        send(identity, request, answer)

    samples = client.generate([[1, 2]] * 16, Sampling(max_tokens=TOKENS))
    daemon.until(lambda: len(daemon.engine.running) == 16)
    wire.cut()
    monkeypatch.setattr("refitd.generation.MESSAGE_BYTES", 1000)
    monkeypatch.setattr(daemon.generation, "send", measured)
    daemon.step(TOKENS)
    assert [sample.token_ids.tolist() for sample in samples] == [[*range(TOKENS)]] * 16
    assert max(sizes) <= 1000 + 8 * TOKENS < 8 * TOKENS * 16
