"""Sessions against a real socket: leases, resuming, identities, the death of processes, fencing of writers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AcknowledgeGeneration,
    AcquireWriter,
    CommitRefit,
    Failed,
    GenerationForgotten,
    GenerationResumed,
    GenerationStarted,
    GetDigest,
    GetStatus,
    Goodbye,
    Heartbeat,
    HeartbeatAcknowledged,
    Hello,
    ReleaseWriter,
    ResumeGeneration,
    SessionClosed,
    Status,
    StreamCursor,
    WeightsDigest,
    WriterAcquired,
    WriterReleased,
)
from tests.server.raw_client import RawClient, raw_client
from tests.server.small_daemon import EPOCH, SmallDaemon, small_daemon

Connect = Callable[..., RawClient]

TRAINER = """
import os, sys
sys.path[:0] = sys.argv[2:]
from tests.server.raw_client import RawClient
client = RawClient(sys.argv[1])
print(client.hello(pid=os.getpid()).session, flush=True)
client.generate(4000)
from refit_protocol.messages import AcquireWriter, WriterAcquired
client.ask(AcquireWriter(), WriterAcquired)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def trainer(endpoint: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with a session, a stream and the writer's role; and its session's token."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, endpoint, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        token = process.stdout.readline().strip()
        assert process.stdout.readline() == "ready\n"
        yield process, token
    finally:
        process.kill()
        process.communicate()


# --- opening and closing ----------------------------------------------------------------------------------------------


def test_hello_says_what_holds_for_the_session(daemon: SmallDaemon, connect: Connect) -> None:
    welcome = connect().hello(lease_seconds=12.0)
    assert welcome.epoch == EPOCH
    assert not welcome.resumed
    assert welcome.lease_seconds == 12.0
    assert welcome.heartbeat_seconds < welcome.lease_seconds / 2
    assert welcome.limits.requests_per_session == daemon.config.server.max_requests_per_session


def test_a_watched_client_needs_fewer_heartbeats(daemon: SmallDaemon, connect: Connect) -> None:
    """Its process is seen to end, so a thousand idle trainers need not wake the daemon fifty times a second."""
    settings = daemon.config.server
    assert connect().hello(pid=os.getpid()).lease_seconds == settings.watched_lease_seconds > settings.lease_seconds
    assert connect().hello().lease_seconds == settings.lease_seconds


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"protocol_versions": [2, 3]}, ErrorCode.UNSUPPORTED_VERSION),
        ({"protocol_versions": []}, ErrorCode.UNSUPPORTED_VERSION),
        ({"lease_seconds": -1.0}, ErrorCode.MALFORMED_MESSAGE),
        ({"lease_seconds": float("nan")}, ErrorCode.MALFORMED_MESSAGE),
        ({"lease_seconds": float("inf")}, ErrorCode.MALFORMED_MESSAGE),
        ({"pid": 0}, ErrorCode.MALFORMED_MESSAGE),
        ({"pid": -5}, ErrorCode.MALFORMED_MESSAGE),
        ({"pid": 1 << 62}, ErrorCode.MALFORMED_MESSAGE),
        ({"pid": (1 << 22) - 1}, ErrorCode.PEER_NOT_ALLOWED),
    ],
)
def test_impossible_hello_is_refused(connect: Connect, fields: dict[str, object], code: ErrorCode) -> None:
    client = connect()
    command = Hello(**{"protocol_versions": [1], "client": "raw", **fields})  # type: ignore[arg-type]
    assert client.refusal(command) is code
    assert client.ask(GetStatus(), Status).sessions == 0


def test_process_of_another_user_is_refused(connect: Connect) -> None:
    """A client may only name a process of the daemon's own user."""
    if os.getuid() != 0:
        pytest.skip("needs root to start a process of another user")
    other = subprocess.Popen(["cat"], user=65534, stdin=subprocess.PIPE)
    try:
        assert (
            connect().refusal(Hello(protocol_versions=[1], client="raw", pid=other.pid)) is ErrorCode.PEER_NOT_ALLOWED
        )
    finally:
        other.kill()
        other.communicate()


def test_requests_need_a_session(connect: Connect) -> None:
    client = connect()
    assert client.refusal(Heartbeat()) is ErrorCode.NO_SESSION
    client.session = "0" * 32
    assert client.refusal(Heartbeat()) is ErrorCode.NO_SESSION


def test_goodbye_ends_the_session_and_its_streams(daemon: SmallDaemon, connect: Connect) -> None:
    client = connect()
    client.hello()
    client.generate(100)
    daemon.until(lambda: len(daemon.engine.running) == 1)
    client.ask(Goodbye(), SessionClosed)
    daemon.until(lambda: not daemon.engine.running)
    assert client.refusal(Heartbeat()) is ErrorCode.NO_SESSION


def test_session_limit(tmp_path: Path) -> None:
    with small_daemon(tmp_path, max_sessions=2) as daemon, raw_client(daemon.endpoint) as client:
        client.hello()
        client.hello()
        failed = client.ask(Hello(protocol_versions=[1], client="third"), Failed)
        assert failed.code is ErrorCode.SESSION_LIMIT
        assert failed.retryable
        assert failed.details["limit"] == 2
        client.ask(Goodbye(), SessionClosed)
        client.hello()


def test_requests_of_a_session_are_limited_but_heartbeats_are_not(tmp_path: Path) -> None:
    """A client at its limit can still keep its lease and cancel."""
    with small_daemon(tmp_path, max_requests_per_session=2) as daemon, raw_client(daemon.endpoint) as client:
        client.hello()
        slow = [client.send(GetDigest()) for _ in range(2)]
        assert client.refusal(GetDigest()) is ErrorCode.LIMIT_EXCEEDED
        client.ask(Heartbeat(), HeartbeatAcknowledged)
        daemon.in_loop(daemon.digest_may_go_on.set)
        assert {client.receive()[0].id for _ in slow} == set(slow)
        client.ask(GetDigest(), WeightsDigest)


# --- request ids ------------------------------------------------------------------------------------------------------


def test_request_ids_rise(connect: Connect) -> None:
    """An id that is not above the last is refused, and does not disturb the ones after."""
    client = connect()
    client.hello()
    client.ask(Heartbeat(), HeartbeatAcknowledged)
    last = client.last
    for stale in (last, 1):
        client.send(Heartbeat(), id=stale)
        header, _ = client.receive()
        assert isinstance(header.body, Failed)
        assert header.body.code is ErrorCode.DUPLICATE_REQUEST
        assert header.body.details["last"] == last
    client.last = last
    client.ask(Heartbeat(), HeartbeatAcknowledged)


@pytest.mark.parametrize("request_id", [0, -1])
def test_impossible_request_id_is_refused(connect: Connect, request_id: int) -> None:
    client = connect()
    client.hello()
    client.send(Heartbeat(), id=request_id)
    header, _ = client.receive()
    assert isinstance(header.body, Failed)
    assert header.body.code is ErrorCode.MALFORMED_MESSAGE


# --- the lease --------------------------------------------------------------------------------------------------------


def test_lease_ends_without_a_sign_of_life(daemon: SmallDaemon, connect: Connect) -> None:
    """A client that gave no pid and falls silent is noticed by its lease; what it ran leaves the engine."""
    client = connect()
    token = client.hello(lease_seconds=0.2).session
    client.generate(1000)
    daemon.until(lambda: token in daemon.ended)
    assert daemon.ended[token] == "lease ended"
    assert not daemon.engine.running
    assert client.refusal(Heartbeat()) is ErrorCode.NO_SESSION


def test_any_request_renews_the_lease(daemon: SmallDaemon, connect: Connect) -> None:
    """Even one that is refused."""
    client = connect()
    client.hello(lease_seconds=60.0)
    session = next(iter(daemon.sessions))
    before = session.lease_end
    client.send(Heartbeat(), id=client.last)
    client.receive()
    assert session.lease_end > before


def test_lease_is_kept_within_the_configured_bounds(daemon: SmallDaemon, connect: Connect) -> None:
    client = connect()
    assert client.hello(lease_seconds=1e9).lease_seconds == daemon.config.server.max_lease_seconds
    assert client.hello(lease_seconds=1e-9).lease_seconds == daemon.config.server.min_lease_seconds


# --- death ------------------------------------------------------------------------------------------------------------


def test_killed_trainer_is_noticed_at_once(daemon: SmallDaemon, connect: Connect) -> None:
    """Long before its lease: its stream leaves the engine, the writer's role is free, its session is gone."""
    with trainer(daemon.endpoint) as (process, token):
        daemon.until(lambda: len(daemon.engine.running) == 1)
        process.kill()
        daemon.until(lambda: token in daemon.ended)
    assert daemon.ended[token] == "its process ended"
    daemon.until(lambda: not daemon.engine.running)
    other = connect()
    other.hello()
    other.ask(AcquireWriter(), WriterAcquired)


def test_replies_of_a_dead_process_do_not_reach_its_successor(daemon: SmallDaemon, connect: Connect) -> None:
    """A restarted client with the same identity and the same ids never gets what its predecessor asked for."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        first = connect(identity=b"trainer-0", reconnects=False)
        token = first.hello(pid=process.pid).session
        asked = first.send(GetDigest())
        daemon.until(lambda: daemon.digests_begun == 1)
        second = connect(identity=b"trainer-0")
        second.ask(GetStatus(), Status)
        process.kill()
        daemon.until(lambda: token in daemon.ended)
    finally:
        process.kill()
        process.communicate()
    second.last = asked - 1
    assert isinstance(second.reply_to(second.send(GetStatus())), Status)
    assert not second.replies


# --- one identity, two clients ----------------------------------------------------------------------------------------


def test_same_identity_twice(daemon: SmallDaemon, connect: Connect) -> None:
    """The later Hello has the identity. The earlier session is detached: nothing of its reaches the other, and it can
    take its streams up again over another connection."""
    first = connect(identity=b"twin", reconnects=False)
    token = first.hello().session
    stream, slow = first.generate(6), first.send(GetDigest())
    daemon.until(lambda: len(daemon.engine.running) == 1 and daemon.digests_begun == 1)
    second = connect(identity=b"twin")
    second.hello()
    daemon.step(6)
    daemon.in_loop(daemon.digest_may_go_on.set)
    assert isinstance(second.ask(GetDigest(), WeightsDigest), WeightsDigest)
    assert not second.replies
    daemon.until(lambda: daemon.server.undelivered_replies >= 2)
    again = connect()
    again.last = slow
    again.session = token
    assert again.hello(resume=token).resumed
    again.ask(ResumeGeneration(request=stream), GenerationResumed)
    assert again.read_streams({stream}) == {stream: [0, 1, 2, 3, 4, 5]}


# --- reconnect --------------------------------------------------------------------------------------------------------


def test_stream_is_resumed_from_a_cursor_after_a_reconnect(daemon: SmallDaemon, connect: Connect) -> None:
    """Tokens made while nobody was connected, and under which version each was made, come behind the cursor."""
    with raw_client(daemon.endpoint) as lost:
        token = lost.hello().session
        stream = lost.generate(10)
        daemon.until(lambda: len(daemon.engine.running) == 1)
        daemon.step(4)
        lost.receive()
        header, _ = lost.receive()
        assert [delta.count for delta in header.body.deltas] == [4]
    daemon.step(1)
    daemon.until(lambda: not next(iter(daemon.sessions)).connected)
    daemon.in_loop(lambda: setattr(daemon.gate, "version", 7))
    daemon.step(2)
    client = connect()
    client.last = stream
    welcome = client.hello(resume=token)
    assert welcome.resumed
    assert welcome.session == token
    resume = ResumeGeneration(request=stream, cursors=[StreamCursor(prompt=0, output=0, position=3)])
    assert not client.ask(resume, GenerationResumed).finished
    header, _ = client.replies.pop(0)
    delta = header.body.deltas[0]
    assert (delta.position, delta.count) == (3, 4)
    assert [(run.version, run.count) for run in delta.versions] == [(0, 2), (7, 2)]
    daemon.step(3)
    header, _ = client.receive()
    assert header.body.deltas[0].position == 7


def test_a_stream_says_nothing_before_it_is_taken_up_again(daemon: SmallDaemon, connect: Connect) -> None:
    """Between Hello and ResumeGeneration a step would come without what was lost; nor is its end said by itself."""
    with raw_client(daemon.endpoint) as lost:
        token = lost.hello().session
        stream = lost.generate(4)
        daemon.until(lambda: len(daemon.engine.running) == 1)
        daemon.step(2)
    client = connect()
    client.last = stream
    client.hello(resume=token)
    daemon.step(2)
    client.ask(Heartbeat(), HeartbeatAcknowledged)
    assert not client.replies
    assert client.ask(ResumeGeneration(request=stream), GenerationResumed).finished
    assert isinstance(client.replies[0][0].body, GenerationStarted)
    assert client.read_streams({stream}) == {stream: [0, 1, 2, 3]}


def test_finished_stream_is_kept_until_acknowledged(daemon: SmallDaemon, connect: Connect) -> None:
    """A result that nobody read can be fetched, any number of times, until the client says that it has it."""
    with raw_client(daemon.endpoint) as lost:
        token = lost.hello().session
        stream = lost.generate(10)
        daemon.until(lambda: len(daemon.engine.running) == 1)
    daemon.step(10)
    client = connect()
    client.last = stream
    client.hello(resume=token)
    for _ in range(2):
        assert client.ask(ResumeGeneration(request=stream), GenerationResumed).finished
        assert client.read_streams({stream}) == {stream: list(range(10))}
    assert client.ask(AcknowledgeGeneration(requests=[stream, 999]), GenerationForgotten).requests == [stream]
    assert client.refusal(ResumeGeneration(request=stream)) is ErrorCode.UNKNOWN_REQUEST


def test_kept_results_are_bounded(tmp_path: Path) -> None:
    """A client that never acknowledges is refused new work, and served again once it does."""
    with small_daemon(tmp_path, max_buffered_bytes=100) as daemon, raw_client(daemon.endpoint) as client:
        client.hello()
        first = client.generate(50)
        daemon.until(lambda: len(daemon.engine.running) == 1)
        daemon.step(50)
        client.read_streams({first})
        refused = client.generate(5)
        failed = client.reply_to(refused)
        assert isinstance(failed, Failed)
        assert failed.code is ErrorCode.TOO_MANY_REQUESTS
        client.ask(AcknowledgeGeneration(requests=[first]), GenerationForgotten)
        second = client.generate(5)
        daemon.until(lambda: len(daemon.engine.running) == 1)
        daemon.step(5)
        assert client.read_streams({second}) == {second: list(range(5))}


def test_a_session_that_ends_leaves_nothing_of_its_requests(daemon: SmallDaemon, connect: Connect) -> None:
    """Neither those that run nor those that nobody has acknowledged."""
    client = connect()
    client.hello()
    finished = client.generate(1)
    daemon.until(lambda: len(daemon.engine.running) == 1)
    daemon.step()
    client.read_streams({finished})
    client.generate(50)
    client.generate(50, stream=False)
    daemon.until(lambda: len(daemon.engine.running) == 2)
    client.ask(Goodbye(), SessionClosed)
    daemon.until(lambda: not daemon.engine.running)
    daemon.until(lambda: len(daemon.sessions) == 0)
    assert daemon.in_loop(lambda: len(daemon.generation._jobs)) == 0


def test_resume_of_a_session_that_ended_opens_a_new_one(connect: Connect) -> None:
    """A daemon that was restarted, or whose lease has ended, says so by `resumed` and, after a restart, the epoch."""
    client = connect()
    welcome = client.hello(resume="f" * 32)
    assert not welcome.resumed
    assert welcome.session != "f" * 32


def test_daemon_restart_is_seen(tmp_path: Path) -> None:
    """Over the same socket path, a client of the old daemon gets `no_session` from the new one."""
    with small_daemon(tmp_path) as before, raw_client(before.endpoint) as client:
        client.hello()
        with_old = client.session
        client.ask(Heartbeat(), HeartbeatAcknowledged)
    with small_daemon(tmp_path) as after, raw_client(after.endpoint) as client:
        client.session = with_old
        assert client.refusal(Heartbeat()) is ErrorCode.NO_SESSION
        assert not client.hello(resume=with_old).resumed


# --- the writer -------------------------------------------------------------------------------------------------------


def test_one_writer_and_its_fencing(connect: Connect) -> None:
    """A second writer is refused or takes over; then every frame of the first is stale, whatever epoch it names."""
    first, second = connect(), connect()
    first.hello(client="one")
    second.hello(client="two")
    epoch = first.ask(AcquireWriter(), WriterAcquired).epoch
    assert epoch > EPOCH
    assert first.ask(AcquireWriter(), WriterAcquired).epoch == epoch
    busy = second.ask(AcquireWriter(), Failed)
    assert busy.code is ErrorCode.WRITER_BUSY
    assert busy.retryable
    assert busy.details["writer"] == "one"
    first.ask(CommitRefit(epoch=epoch, source=1), WeightsDigest)
    taken = second.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
    assert taken > epoch
    for stale in (epoch, taken, 0, EPOCH):
        assert first.refusal(CommitRefit(epoch=stale, source=1)) is ErrorCode.STALE_EPOCH
    assert second.refusal(CommitRefit(epoch=epoch, source=1)) is ErrorCode.STALE_EPOCH
    second.ask(CommitRefit(epoch=taken, source=1), WeightsDigest)
    first.ask(ReleaseWriter(), WriterReleased)
    second.ask(CommitRefit(epoch=taken, source=1), WeightsDigest)


def test_writer_keeps_its_role_while_its_connection_is_lost(daemon: SmallDaemon, connect: Connect) -> None:
    """Until its lease ends; after a resume its epoch still holds."""
    with raw_client(daemon.endpoint) as lost:
        token = lost.hello().session
        epoch = lost.ask(AcquireWriter(), WriterAcquired).epoch
        last = lost.last
    other, again = connect(), connect()
    other.hello()
    assert other.refusal(AcquireWriter()) is ErrorCode.WRITER_BUSY
    again.last = last
    again.hello(resume=token)
    again.ask(CommitRefit(epoch=epoch, source=1), WeightsDigest)


def test_new_epoch_after_release(connect: Connect) -> None:
    """What a writer sent before it gave the role up is stale when it has it again."""
    client = connect()
    client.hello()
    before = client.ask(AcquireWriter(), WriterAcquired).epoch
    client.ask(ReleaseWriter(), WriterReleased)
    assert client.refusal(CommitRefit(epoch=before, source=1)) is ErrorCode.STALE_EPOCH
    assert client.ask(AcquireWriter(), WriterAcquired).epoch > before
    assert client.refusal(CommitRefit(epoch=before, source=1)) is ErrorCode.STALE_EPOCH
