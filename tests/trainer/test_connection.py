"""Sessions over broken connections, silent daemons and new daemons, against a peer that does what it is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode, Fault
from refit_protocol.messages import (
    AcknowledgeGeneration,
    CancelGeneration,
    Generate,
    GenerationCancelled,
    GenerationForgotten,
    GenerationResumed,
    GetManifest,
    GetStatus,
    Manifest,
    ResumeGeneration,
    Sampling,
    StreamCursor,
    TokenDelta,
    TokensGenerated,
    VersionRun,
)
from refit_trainer import AsyncDaemon, Daemon, DaemonRestarted, DaemonUnreachable, RefitdError, SessionLost
from refit_trainer.link import CurveKeys
from tests.trainer.background import in_background
from tests.trainer.peer import (
    FINISHED,
    PATIENCE_SECONDS,
    STATUS,
    Asked,
    Peer,
    begin_stream,
    endpoint_in,
    running,
    send_tokens,
)


def test_heartbeats_come_while_idle(tmp_path: Path) -> None:
    """The lease is renewed without anybody calling."""
    with running(Peer(endpoint_in(tmp_path), heartbeat_seconds=0.05)) as peer, Daemon.connect(peer.endpoint):
        for _ in range(3):
            peer.heartbeats.get(timeout=PATIENCE_SECONDS)


def test_a_way_that_is_about_to_be_used_is_kept_in_use(peer: Peer) -> None:
    """Long before the next heartbeat is due; what comes in the middle of it is answered as ever."""

    async def run() -> None:
        async with await AsyncDaemon.connect(peer.endpoint) as client:
            with client.connection.attentive(60.0):
                for _ in range(3):
                    await asyncio.to_thread(peer.heartbeats.get, timeout=PATIENCE_SECONDS)
                asking = asyncio.create_task(client.manifest())
                (await asyncio.to_thread(peer.next, GetManifest)).reply(Manifest(tensors=[]))
                assert (await asking).tensors == []

    asyncio.run(run())


def test_silent_connection_is_given_up_and_opened_anew(tmp_path: Path) -> None:
    """A daemon that stops answering heartbeats gets a new connection that takes the session up again."""
    peer = Peer(endpoint_in(tmp_path), lease_seconds=0.2, heartbeat_seconds=0.05, answers_heartbeats=False)
    with running(peer), Daemon.connect(peer.endpoint) as client:
        peer.wait_for_hellos(2)
        assert peer.hellos[1].resume == client.welcome.session


def test_pending_request_fails_when_the_connection_breaks(peer: Peer, client: Daemon) -> None:
    """Its outcome is unknown, and said so at once instead of at the timeout."""
    thread, outcome = in_background(client.manifest)
    peer.next(GetManifest)
    peer.stop()
    thread.join()
    peer.start()
    assert isinstance(outcome[0], DaemonUnreachable)
    assert "outcome unknown" in str(outcome[0])


def test_stream_goes_on_after_a_reconnect_from_its_cursor(peer: Peer, client: Daemon) -> None:
    """Nothing is lost and nothing comes twice."""
    deltas = client.stream([[1, 2]], Sampling(max_tokens=4))
    asked = begin_stream(peer.next(Generate))
    send_tokens(asked, 0, [10, 11])
    assert next(deltas).token_ids.tolist() == [10, 11]
    peer.stop()
    peer.start()
    resumed = peer.next(ResumeGeneration)
    assert resumed.body == ResumeGeneration(request=asked.id, cursors=[StreamCursor(prompt=0, output=0, position=2)])
    resumed.reply(GenerationResumed(request=asked.id, finished=False))
    again = Asked(peer, resumed.identity, asked.id, asked.session, asked.body, [])
    send_tokens(again, 2, [12, 13], last=True)
    again.reply(FINISHED)
    assert [delta.token_ids.tolist() for delta in deltas] == [[12, 13]]
    assert deltas.finished == FINISHED


def test_restarted_daemon_ends_streams_and_is_told_once(peer: Peer, client: Daemon) -> None:
    """Another epoch means other weights: what was under way fails, and the client goes on with the new daemon."""
    deltas = client.stream([[1, 2]])
    begin_stream(peer.next(Generate))
    peer.stop()
    peer.epoch = 2
    peer.start()
    with pytest.raises(DaemonRestarted):
        next(deltas)
    peer.answer = lambda asked: asked.reply(Manifest(tensors=[]))
    assert client.manifest() == Manifest(tensors=[])
    assert client.welcome.epoch == 2


def test_restart_while_idle_is_told_by_the_next_call(peer: Peer, client: Daemon) -> None:
    """A trainer never generates from a fresh daemon's weights unawares; looking at the status is free."""
    peer.stop()
    peer.epoch = 2
    peer.start()
    peer.wait_for_hellos(2)
    peer.answer = lambda asked: asked.reply(STATUS if isinstance(asked.body, GetStatus) else Manifest(tensors=[]))
    assert client.status() == STATUS
    with pytest.raises(DaemonRestarted):
        client.manifest()
    assert client.manifest() == Manifest(tensors=[])


def test_lost_session_ends_streams(peer: Peer, client: Daemon) -> None:
    """The same daemon, but the lease has run out."""
    deltas = client.stream([[1, 2]])
    begin_stream(peer.next(Generate))
    peer.stop()
    peer.keeps_sessions = False
    peer.start()
    with pytest.raises(SessionLost):
        next(deltas)


def test_expired_session_is_replaced(peer: Peer, client: Daemon) -> None:
    """A request that finds its session gone says so; it may be tried again: the client has a new one by itself."""
    thread, outcome = in_background(client.manifest)
    peer.next(GetManifest).fail(ErrorCode.NO_SESSION)
    thread.join()
    assert isinstance(outcome[0], SessionLost)
    assert outcome[0].retryable
    assert "the next call opens another" in str(outcome[0])
    peer.wait_for_hellos(2)
    peer.answer = lambda asked: asked.reply(Manifest(tensors=[]))
    assert client.manifest() == Manifest(tensors=[])


def test_generation_on_an_expired_session_opens_a_new_one(peer: Peer, client: Daemon) -> None:
    """Refused as a whole; the next one is sent on the new session."""
    samples = client.generate([[1, 2]])
    peer.next(Generate).fail(ErrorCode.NO_SESSION)
    with pytest.raises(SessionLost):
        next(samples)
    peer.wait_for_hellos(2)
    samples = client.generate([[1, 2]])
    begin_stream(peer.next(Generate)).reply(FINISHED)
    assert list(samples) == []


def test_gone_daemon_ends_calls_and_streams_with_our_patience(tmp_path: Path) -> None:
    """Whoever has other daemons to go to does not wait out the lease, nor the bound of a slow call."""
    peer = Peer(endpoint_in(tmp_path))
    with running(peer), Daemon.connect(peer.endpoint, patience_seconds=0.2, timeout_seconds=60.0) as client:
        stream = client.stream([[1, 2]])
        peer.next(Generate)
        peer.stop()
        with pytest.raises(DaemonUnreachable, match=r"0\.2 s"):
            list(stream)
        with pytest.raises(DaemonUnreachable, match=r"0\.2 s"):
            client.manifest()
        peer.start()


def test_gone_daemon_ends_streams_with_the_lease(tmp_path: Path) -> None:
    """A stream waits for a reconnect only as long as its session can be alive."""
    peer = Peer(endpoint_in(tmp_path), lease_seconds=0.3)
    peer.start()
    with Daemon.connect(peer.endpoint) as client:
        deltas = client.stream([[1, 2]])
        begin_stream(peer.next(Generate))
        peer.stop()
        with pytest.raises(DaemonUnreachable):
            next(deltas)


def test_patience_is_that_of_the_outage_not_of_a_connection(tmp_path: Path) -> None:
    """Connections that come up and break again do not make a stream wait for ever."""
    peer = Peer(endpoint_in(tmp_path))
    with running(peer), Daemon.connect(peer.endpoint, patience_seconds=2.0, timeout_seconds=60.0) as client:
        stream = client.stream([[1, 2]])
        begin_stream(peer.next(Generate))
        peer.answers_hello = False
        thread, outcome = in_background(list, stream)
        while thread.is_alive():
            seen = len(peer.hellos)
            peer.stop()
            peer.start()
            peer.wait_for_hellos(seen + 1)
        assert isinstance(outcome[0], DaemonUnreachable)
        assert "2 s" in str(outcome[0])


def test_a_replay_that_cannot_be_read_ends_its_stream_alone(peer: Peer, client: Daemon) -> None:
    """With a typed error, instead of one connection after the other; the daemon need not keep it."""
    broken, whole = client.stream([[1, 2]]), client.stream([[3]])
    first, second = (begin_stream(peer.next(Generate)) for _ in range(2))
    peer.stop()
    peer.start()
    replay = peer.next(ResumeGeneration)
    delta = TokenDelta(request=first.id, prompt=0, output=0, position=0, count=2, versions=[VersionRun(3, 2)])
    replay.reply(TokensGenerated(deltas=[delta]), blobs=[b"\0\0\0\0"], last=False, id=0)
    with pytest.raises(RefitdError, match="broke the protocol"):
        next(broken)
    cancelled = peer.next(CancelGeneration)
    assert cancelled.body.request == first.id
    cancelled.reply(GenerationCancelled(requests=[first.id]))
    resumed = peer.next(ResumeGeneration)
    assert resumed.body.request == second.id
    resumed.reply(GenerationResumed(request=second.id, finished=False))
    again = Asked(peer, resumed.identity, second.id, second.session, second.body, [])
    send_tokens(again, 0, [7], last=True)
    assert peer.next(AcknowledgeGeneration).body.requests == [first.id]
    again.reply(FINISHED)
    assert [delta.token_ids.tolist() for delta in whole] == [[7]]


def test_a_stream_left_without_a_connection_is_cancelled_over_the_next(peer: Peer, client: Daemon) -> None:
    """Neither resumed for nobody, nor kept by the daemon until the session ends."""
    deltas = client.stream([[1, 2]])
    asked = begin_stream(peer.next(Generate))
    peer.stop()
    deltas.close()
    peer.start()
    cancelled = peer.next(CancelGeneration)
    assert cancelled.body.request == asked.id
    cancelled.reply(GenerationCancelled(requests=[asked.id]))
    assert peer.next(AcknowledgeGeneration).body.requests == [asked.id]


def test_an_acknowledgement_that_was_lost_is_said_again(peer: Peer, client: Daemon) -> None:
    """Else the daemon would keep the results, and count them, until the session ends."""
    samples = client.generate([[1, 2]])
    asked = begin_stream(peer.next(Generate))
    asked.reply(FINISHED)
    assert list(samples) == []
    assert peer.next(AcknowledgeGeneration).body.requests == [asked.id]
    peer.stop()
    peer.start()
    again = peer.next(AcknowledgeGeneration)
    assert again.body.requests == [asked.id]
    again.reply(GenerationForgotten(requests=[asked.id]))


def test_a_request_lost_with_its_connection_is_not_the_callers_mistake(peer: Peer, client: Daemon) -> None:
    """The daemon has never seen it: the same call may be made again, here or at another daemon."""
    deltas = client.stream([[1, 2]])
    peer.next(Generate)
    peer.stop()
    peer.start()
    peer.next(ResumeGeneration).fail(ErrorCode.UNKNOWN_REQUEST)
    with pytest.raises(DaemonUnreachable) as caught:
        next(deltas)
    assert (caught.value.fault, caught.value.retryable) == (Fault.DAEMON, True)


KEY = b"0" * 40


@pytest.mark.parametrize(
    ("endpoint", "curve", "says"),
    [
        ("tcp://127.0.0.1", None, "'tcp://127.0.0.1' is no ipc:///path and no tcp://host:port"),
        ("tcp://127.0.0.1:9", CurveKeys(KEY, KEY, b"secret"), "curve: a key has to be 40 characters of Z85"),
        ("tcp://127.0.0.1:9", CurveKeys(KEY, KEY, None), "curve: a key .* as bytes"),  # type: ignore[arg-type]
    ],
)
def test_what_no_socket_can_be_connected_to_is_said_at_once(endpoint: str, curve: CurveKeys | None, says: str) -> None:
    """Not waited for: nothing but the caller can change it."""
    with pytest.raises(ValueError, match=says):
        Daemon.connect(endpoint, curve=curve)
