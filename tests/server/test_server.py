"""The socket: envelopes, routing, back-pressure. Clients are bare sockets; the engine steps when told to."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from refit_protocol.codec import MAGIC, decode_reply, encode_request
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    CancelGeneration,
    Failed,
    Generate,
    GenerationCancelled,
    GenerationFinished,
    GenerationStarted,
    GetDigest,
    GetManifest,
    GetStatus,
    Heartbeat,
    HeartbeatAcknowledged,
    Manifest,
    RequestHeader,
    Sampling,
    Status,
    TokensGenerated,
    WakeUp,
    WeightsDigest,
)
from refit_protocol.states import EngineEvent
from refitd.server import split_envelope
from refitd.sessions import Session
from tests.server.raw_client import RawClient, raw_client
from tests.server.small_daemon import SmallDaemon, small_daemon

Connect = Callable[..., RawClient]


def expected_tokens(count: int) -> list[int]:
    return [index % 500 for index in range(count)]


def test_envelope_ends_at_the_first_empty_frame() -> None:
    """A correlation id before the delimiter is part of the way back; an empty blob is no delimiter."""
    assert split_envelope([b"id", b"", MAGIC, b"h"]) == (b"id", (), [MAGIC, b"h"])
    assert split_envelope([b"id", b"corr", b"", MAGIC, b"h"]) == (b"id", (b"corr",), [MAGIC, b"h"])
    assert split_envelope([b"id", MAGIC, b"h" * 300, b""]) == (b"id", (), [])
    assert split_envelope([b"id", *[b"x"] * 5, b"", MAGIC]) == (b"id", (), [])
    assert split_envelope([b"id"]) == (b"id", (), [])


def test_req_socket_with_correlation_is_served(daemon: SmallDaemon) -> None:
    """The unary socket of ten lines: REQ, relaxed and correlated."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.REQ_RELAXED, 1)
        socket.set(zmq.REQ_CORRELATE, 1)
        socket.connect(daemon.endpoint)
        socket.send_multipart(encode_request(RequestHeader(id=7, body=GetStatus())))
        header, _ = decode_reply(socket.recv_multipart())
    assert header.id == 7
    assert isinstance(header.body, Status)


def test_late_reply_never_answers_a_new_request(daemon: SmallDaemon, connect: Connect) -> None:
    """A REQ client times out on a slow request and asks something else: it gets the answer to that."""
    session = connect().hello().session
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.REQ_RELAXED, 1)
        socket.set(zmq.REQ_CORRELATE, 1)
        socket.connect(daemon.endpoint)
        socket.send_multipart(encode_request(RequestHeader(id=50, body=GetDigest(), session=session)))
        daemon.until(lambda: daemon.digests_begun == 1)
        socket.send_multipart(encode_request(RequestHeader(id=51, body=GetDigest(), session=session)))
        daemon.in_loop(daemon.digest_may_go_on.set)
        header, _ = decode_reply(socket.recv_multipart())
    assert header.id == 51
    assert isinstance(header.body, WeightsDigest)


def test_every_kind_of_nonsense_is_answered_and_the_next_request_is_served(
    daemon: SmallDaemon, connect: Connect
) -> None:
    """No delimiter, no header, wrong magic, no message at all: a typed refusal each, and the server goes on."""
    client = connect()
    nonsense: list[tuple[bytes, ...]] = [
        (b"no delimiter",),
        (b"",),
        (b"", MAGIC),
        (b"", b"RFT9", b"\x80"),
        (b"", MAGIC, b"\x80"),
        (b"", MAGIC, b"\xc1"),
    ]
    for frames in nonsense:
        client.send_frames(*frames)
        header, _ = client.receive()
        assert isinstance(header.body, Failed)
        assert header.body.code is ErrorCode.MALFORMED_MESSAGE
        assert header.id == 0
    assert client.ask(GetStatus(), Status).version == 0


def test_refusal_of_an_unknown_command_names_its_request(connect: Connect) -> None:
    """A header with an id but an unknown body can still be matched to its refusal."""
    client = connect()
    client.send_frames(b"", MAGIC, b"\x82\xa2id\x2a\xa4body\x81\xa4type\xa5Dance")
    header, _ = client.receive()
    assert header.id == 42
    assert isinstance(header.body, Failed)


def test_command_that_nobody_serves_is_refused(connect: Connect) -> None:
    client = connect()
    client.hello()
    assert client.refusal(WakeUp()) is ErrorCode.UNSUPPORTED


def test_heartbeats_and_cancels_never_wait_for_slow_requests(daemon: SmallDaemon, connect: Connect) -> None:
    """While a digest is being made, everything else is answered at once."""
    client = connect()
    client.hello()
    slow = client.send(GetDigest())
    stream = client.generate(1000)
    daemon.until(lambda: daemon.digests_begun == 1 and len(daemon.engine.running) == 1)
    client.ask(Heartbeat(), HeartbeatAcknowledged)
    assert client.ask(CancelGeneration(request=stream), GenerationCancelled).requests == [stream]
    assert not any(header.id == slow for header, _ in client.replies)
    daemon.in_loop(daemon.digest_may_go_on.set)
    assert isinstance(client.reply_to(slow), WeightsDigest)


@pytest.mark.parametrize("gate_is_shut", [False, True])
def test_a_stream_begins_before_its_tokens_come(daemon: SmallDaemon, connect: Connect, gate_is_shut: bool) -> None:
    """Also where the engine makes tokens while the request's other prompts are still on their way to it, and where the
    request has to wait at the gate."""
    client = connect()
    client.hello()
    submit = daemon.engine.submit

    async def submit_and_step(request: tuple[str, int]) -> None:
        await submit(request)
        daemon.engine.step()

    daemon.engine.submit = submit_and_step  # type: ignore[method-assign]
    if gate_is_shut:
        daemon.in_loop(lambda: daemon.gate.step(EngineEvent.REFIT_STARTED))
    stream = client.generate(100, prompts=3)
    if gate_is_shut:
        assert isinstance(client.reply_to(stream), GenerationStarted)
        assert client.replies == []
        daemon.in_loop(lambda: daemon.gate.step(EngineEvent.REFIT_REFUSED))
        assert isinstance(client.receive()[0].body, TokensGenerated)
    else:
        assert [type(client.receive()[0].body) for _ in range(2)] == [GenerationStarted, TokensGenerated]


def test_client_that_stops_reading_loses_nothing(daemon: SmallDaemon, connect: Connect) -> None:
    """200 streams of a client that does not read: its deltas merge, others go on, and all is there when it reads."""
    lazy, lively = connect(receive_queue=1), connect()
    lazy.hello()
    lively.hello()
    streams = {lazy.generate(3000) for _ in range(200)}
    daemon.until(lambda: len(daemon.engine.running) == 200)
    for _ in range(300):
        daemon.step(10)
    assert not daemon.in_loop(lambda: daemon.server.can_send(session_of(daemon, lazy)))
    waiting = daemon.in_loop(lambda: daemon.server.waiting_bytes(session_of(daemon, lazy).identity))
    assert waiting < 32 << 20
    assert lively.ask(GetStatus(), Status).sessions == 2
    mine = lively.generate(5)
    daemon.until(lambda: len(daemon.engine.running) == 1)
    daemon.step(5)
    assert lively.read_streams({mine}) == {mine: expected_tokens(5)}
    tokens = lazy.read_streams(streams)
    assert all(tokens[stream] == expected_tokens(3000) for stream in streams)


def test_client_that_never_reads_is_given_up(tmp_path: Path) -> None:
    """Beyond the configured backlog its session ends; the daemon's memory is bounded and others are served."""
    with (
        small_daemon(tmp_path, max_backlog_bytes=1 << 20) as daemon,
        raw_client(daemon.endpoint, receive_queue=1) as greedy,
        raw_client(daemon.endpoint) as other,
    ):
        token = greedy.hello().session
        for _ in range(3000):
            greedy.send(GetManifest())
        daemon.until(lambda: token in daemon.ended)
        assert daemon.ended[token] == "it does not read its replies"
        assert other.ask(GetStatus(), Status).sessions == 0


def test_backlog_is_delivered_in_order(daemon: SmallDaemon, connect: Connect) -> None:
    """Replies that had to wait keep their order, and none is missing."""
    client = connect(receive_queue=1)
    client.hello()
    asked = [client.send(GetManifest()) for _ in range(1000)]
    daemon.until(lambda: daemon.server.waiting_bytes(session_of(daemon, client).identity) > 0)
    received = [client.receive() for _ in asked]
    assert [header.id for header, _ in received] == asked
    assert all(isinstance(header.body, Manifest) for header, _ in received)


def test_what_comes_while_others_are_tried_again_is_not_overlooked(daemon: SmallDaemon, connect: Connect) -> None:
    """ZeroMQ takes note of it in whatever is done with the socket, and its descriptor does not tell again."""
    lazy, lively = connect(receive_queue=1), connect()
    lazy.hello()
    lively.hello()
    for _ in range(1000):
        lazy.send(GetManifest())
    daemon.until(lambda: daemon.server.waiting_bytes(session_of(daemon, lazy).identity) > 0)

    def retry_when_it_comes() -> int:
        request = lively.send(GetStatus())
        descriptor = daemon.server._socket.fileno()
        assert select.select([descriptor], [], [], 30)[0]
        while select.select([descriptor], [], [], 0)[0]:
            daemon.server._flush_backlogs()
        return request

    assert isinstance(lively.reply_to(daemon.in_loop(retry_when_it_comes)), Status)


STALLED_READER = """
import sys, zmq
sys.path[:0] = sys.argv[2:]
from tests.server.raw_client import RawClient
client = RawClient(sys.argv[1], receive_queue=1)
import os
client.hello(pid=os.getpid())
for _ in range(20): client.generate(4000)
print("ready", flush=True)
sys.stdin.read()
"""


def test_killed_stalled_reader_does_not_stop_the_loop(daemon: SmallDaemon, connect: Connect) -> None:
    """A reader is killed while its queue is full: its requests leave the engine and the others are served."""
    reader = subprocess.Popen(
        [sys.executable, "-c", STALLED_READER, daemon.endpoint, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"ready\n"
        daemon.until(lambda: len(daemon.engine.running) == 20)
        while daemon.in_loop(lambda: all(map(daemon.server.can_send, daemon.sessions))):
            daemon.step(1)
        reader.kill()
        daemon.until(lambda: not daemon.engine.running)
    finally:
        reader.kill()
        reader.communicate()
    assert connect().ask(GetStatus(), Status).sessions == 0


FOREIGNER = """
import os, sys
import zmq
os.setgid(65534)
os.setuid(65534)
socket = zmq.Context().socket(zmq.DEALER)
socket.linger = 0
monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
socket.connect(sys.argv[1])
monitor.recv_multipart()
monitor.recv_multipart()
print("let in" if socket.poll(0) else "hung up on", flush=True)
os._exit(0)
"""


def test_kernel_keeps_other_users_out_even_where_modes_do_not() -> None:
    """A socket and a directory that somebody opened to all are still closed to another user."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    with tempfile.TemporaryDirectory() as directory, small_daemon(Path(directory)) as daemon:
        for path in (Path(directory), Path(directory) / "s"):
            path.chmod(0o777)
        command = [sys.executable, "-c", FOREIGNER, daemon.endpoint]
        foreigner = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert foreigner.stdout == "hung up on\n", foreigner.stderr


def test_unary_generation_brings_all_tokens_at_once(daemon: SmallDaemon, connect: Connect) -> None:
    client = connect()
    client.hello()
    request = client.generate(7, prompts=2, stream=False)
    daemon.until(lambda: len(daemon.engine.running) == 2)
    daemon.step(10)
    header, blobs = client.receive()
    assert header.id == request
    assert isinstance(header.body, GenerationFinished)
    assert [delta.count for delta in header.body.deltas] == [7, 7]
    assert len(blobs[0]) == 2 * 7 * 4


def test_bug_in_a_room_costs_one_request(daemon: SmallDaemon, connect: Connect) -> None:
    """A handler that raises what nobody expected is answered by `internal`, and the loop goes on."""
    client = connect()
    client.hello()
    daemon.in_loop(lambda: daemon.server._instant.update({GetManifest: lambda _call: 1 / 0}))  # type: ignore[attr-defined]
    assert client.refusal(GetManifest()) is ErrorCode.INTERNAL
    assert client.ask(GetStatus(), Status).version == 0


def session_of(daemon: SmallDaemon, client: RawClient) -> Session:
    return next(session for session in daemon.sessions if session.token == client.session)


def test_a_cancellation_right_behind_its_request_is_not_lost(daemon: SmallDaemon, connect: Connect) -> None:
    """Both are read in one go, before the request's task has begun."""
    client = connect()
    client.hello()
    identity = next(iter(daemon.sessions)).identity
    session, ids = client.session, array("i", [1, 2, 3]).tobytes()
    generate = RequestHeader(id=5, body=Generate(prompt_lengths=[3], sampling=Sampling(max_tokens=9)), session=session)
    cancel = RequestHeader(id=6, body=CancelGeneration(request=5), session=session)

    def take_both() -> None:
        daemon.server._take([identity, b"", *encode_request(generate, [ids])])
        daemon.server._take([identity, b"", *encode_request(cancel)])

    daemon.in_loop(take_both)
    while (body := client.receive()[0]).id != 0:
        pass
    assert [delta.finish_reason for delta in body.body.deltas] == ["cancelled"]
    assert isinstance(client.receive()[0].body, GenerationFinished)
    assert not daemon.engine.running
