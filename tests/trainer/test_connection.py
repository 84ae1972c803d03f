"""Sessions over broken connections, silent daemons and new daemons, against a peer that does what it is told."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from refit_protocol.errors import ErrorCode, Fault
from refit_protocol.messages import (
    AcknowledgeGeneration,
    CancelGeneration,
    Generate,
    GenerationCancelled,
    GenerationFinished,
    GenerationForgotten,
    GenerationResumed,
    GenerationStarted,
    GetManifest,
    GetStatus,
    Manifest,
    ResolvedSampling,
    ResumeGeneration,
    Sampling,
    Status,
    StreamCursor,
    TokenDelta,
    TokensGenerated,
    VersionRun,
)
from refit_protocol.states import EngineState
from refit_trainer import (
    AsyncDaemon,
    ClientClosed,
    Daemon,
    DaemonRestarted,
    DaemonUnreachable,
    RefitdError,
    RequestTimedOut,
    SessionLost,
    UsedAfterFork,
)
from refit_trainer.client import LoopThread
from tests.trainer.peer import MODEL, Asked, Peer, endpoint_in, running

RESOLVED = ResolvedSampling(max_tokens=[8], clamped=[False], stop_token_ids=[2], logprobs_mode="processed_logprobs")
STATUS = Status(
    daemon_version="0",
    pid=1,
    epoch=1,
    state=EngineState.READY,
    model=MODEL,
    version=3,
    digest=None,
    digest_mode="off",
    sleep_level=0,
    asleep_tags=[],
    progress=1.0,
    sessions=1,
    writer=None,
    running_requests=0,
    waiting_requests=0,
    restorable_version=None,
    last_refit=None,
    last_error=None,
    uptime_seconds=1.0,
    logprobs_mode="processed_logprobs",
)
FINISHED = GenerationFinished(
    deltas=[],
    outputs=1,
    prompt_tokens=2,
    generated_tokens=4,
    resolved=RESOLVED,
    first_token_milliseconds=1.0,
    total_milliseconds=2.0,
)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with running(Peer(endpoint_in(tmp_path))) as started:
        yield started


@pytest.fixture
def client(peer: Peer) -> Iterator[Daemon]:
    with Daemon.connect(peer.endpoint, timeout_seconds=10) as connected:
        yield connected


def send_tokens(asked: Asked, position: int, token_ids: list[int], *, last: bool = False) -> None:
    delta = TokenDelta(
        request=asked.id,
        prompt=0,
        output=0,
        position=position,
        count=len(token_ids),
        versions=[VersionRun(3, len(token_ids))],
        finish_reason="length" if last else None,
    )
    blobs = [np.array(token_ids, "<i4").tobytes(), np.full(len(token_ids), -0.5, "<f4").tobytes()]
    asked.reply(TokensGenerated(deltas=[delta]), blobs=blobs, last=False, id=0)


def begin_stream(asked: Asked) -> Asked:
    asked.reply(GenerationStarted(resolved=RESOLVED, prompt_lengths=[2]), last=False)
    return asked


def in_background(work: object, *arguments: object) -> tuple[threading.Thread, list[object]]:
    """Runs `work` on a thread; what it returns or raises lands in the list."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work(*arguments))
        except Exception as error:  # noqa: BLE001
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


# --- opening ---


def test_hello_says_who_we_are(peer: Peer) -> None:
    """The daemon learns our name, our process and the lease we ask for."""
    with Daemon.connect(peer.endpoint, client="trainer-7", lease_seconds=12.0) as client:
        assert client.welcome.model == MODEL
    hello = peer.hellos[0]
    assert (hello.client, hello.pid, hello.lease_seconds, hello.resume) == ("trainer-7", os.getpid(), 12.0, None)


def test_missing_daemon_is_said_with_its_path(tmp_path: Path) -> None:
    """Nobody there: an error in time that names the socket and what to do."""
    with pytest.raises(DaemonUnreachable, match=r"refitd.sock does not exist.*REFITD_ENDPOINT") as caught:
        Daemon.connect(endpoint_in(tmp_path), timeout_seconds=0.2)
    assert caught.value.retryable


def test_silent_daemon_is_unreachable(peer: Peer) -> None:
    """A socket behind which nobody answers does not hang the trainer."""
    peer.answers_hello = False
    with pytest.raises(DaemonUnreachable, match="has died or hangs"):
        Daemon.connect(peer.endpoint, timeout_seconds=0.3)


def test_refused_hello_is_the_daemons_own_error(peer: Peer) -> None:
    """Not a timeout, but the code that the daemon gave."""
    peer.refuses_hello = ErrorCode.SESSION_LIMIT
    with pytest.raises(RefitdError) as caught:
        Daemon.connect(peer.endpoint, timeout_seconds=10)
    assert caught.value.code is ErrorCode.SESSION_LIMIT
    assert (caught.value.fault, caught.value.retryable) == (Fault.DAEMON, True)


def test_path_too_long_is_refused_before_connecting() -> None:
    """libzmq would cut it off."""
    with pytest.raises(ValueError, match="at most 107"):
        Daemon.connect("ipc:///" + "x" * 107)


def test_failed_connect_leaves_nothing(tmp_path: Path) -> None:
    """No thread and no descriptor stays behind, but for the pipe that a process' first uvloop opens for good."""
    with pytest.raises(DaemonUnreachable):
        Daemon.connect(endpoint_in(tmp_path), timeout_seconds=0.05)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(DaemonUnreachable):
            Daemon.connect(endpoint_in(tmp_path), timeout_seconds=0.05)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_close_says_goodbye_and_leaves_nothing(peer: Peer) -> None:
    """The session ends at once, and so do thread and sockets; closing twice is harmless."""
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    client = Daemon.connect(peer.endpoint)
    client.close()
    client.close()
    assert peer.goodbyes == 1
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(ClientClosed):
        client.status()


def test_unclosed_client_does_not_keep_the_process(peer: Peer) -> None:
    """A trainer that just ends, or crashes, ends; its daemon sees the process go."""
    program = f"from refit_trainer import Daemon; left = Daemon.connect({peer.endpoint!r}).stream([[1, 2]])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr == ""
    peer.next(Generate)


def test_interrupted_connect_ends_quietly(peer: Peer) -> None:
    """Ctrl-C while the daemon is silent: the interrupt and nothing else, no task left pending."""
    peer.answers_hello = False
    program = f"from refit_trainer import Daemon; Daemon.connect({peer.endpoint!r}, timeout_seconds=60)"
    trainer = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    try:
        peer.wait_for_hellos(1)
        trainer.send_signal(signal.SIGINT)
        _, said = trainer.communicate(timeout=60)
    finally:
        trainer.kill()
        trainer.wait()
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert "Task" not in said


def test_a_closed_asynchronous_client_says_so(peer: Peer) -> None:
    """At once, instead of waiting for a connection that nobody opens any more."""

    async def use() -> None:
        daemon = await AsyncDaemon.connect(peer.endpoint, timeout_seconds=3)
        await daemon.close()
        with pytest.raises(ClientClosed):
            await daemon.status()
        with pytest.raises(ClientClosed):
            await anext(daemon.stream([[1, 2]]))

    asyncio.run(use())


def test_a_call_under_way_ends_when_the_client_is_closed(peer: Peer, client: Daemon) -> None:
    """Also one that has already been handed to the loop."""
    thread, outcome = in_background(client.manifest)
    peer.next(GetManifest)
    client.close()
    thread.join()
    assert isinstance(outcome[0], ClientClosed)


def test_a_call_that_races_with_the_end_of_the_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread stops the loop just when a call is being handed in: it is run, or told, but never left hanging."""
    thread = LoopThread()
    hand_in = asyncio.run_coroutine_threadsafe
    stopper = threading.Thread(target=thread.stop)

    def late(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> concurrent.futures.Future[Any]:
        stopper.start()
        stopper.join(0.1)
        return hand_in(work, loop)

    monkeypatch.setattr("refit_trainer.client.asyncio.run_coroutine_threadsafe", late)
    assert thread.call(asyncio.sleep(0, "done")) == "done"
    stopper.join()
    with pytest.raises(ClientClosed):
        thread.call(asyncio.sleep(0))


# --- requests ---


def test_failed_reply_is_raised_with_everything_in_it(peer: Peer, client: Daemon) -> None:
    """Code, fault, retry and message arrive as attributes."""
    peer.answer = lambda asked: asked.fail(ErrorCode.LOADING, "wait a little")
    with pytest.raises(RefitdError, match="loading: wait a little") as caught:
        client.manifest()
    assert (caught.value.code, caught.value.fault, caught.value.retryable) == (ErrorCode.LOADING, Fault.DAEMON, True)


def test_unanswered_request_times_out_and_its_late_reply_answers_nobody(peer: Peer) -> None:
    """The next request gets its own reply, not the one before."""
    with Daemon.connect(peer.endpoint, timeout_seconds=0.3) as client:
        with pytest.raises(RequestTimedOut, match=r"GetStatus.*0.3 s"):
            client.status()
        late = peer.next(GetStatus)
        thread, outcome = in_background(client.manifest)
        asked = peer.next(GetManifest)
        late.reply(STATUS)
        asked.reply(Manifest(tensors=[]))
        thread.join()
    assert outcome == [Manifest(tensors=[])]


def test_answer_of_another_kind_is_an_error(peer: Peer, client: Daemon) -> None:
    """A daemon that breaks the protocol is told apart from one that refuses."""
    peer.answer = lambda asked: asked.reply(Manifest(tensors=[]))
    with pytest.raises(RefitdError, match="broke the protocol") as caught:
        client.status()
    assert caught.value.fault is Fault.DAEMON


def test_request_ids_rise_whatever_the_threads_do(peer: Peer, client: Daemon) -> None:
    """Many threads may call at once; ids arrive in rising order, as the daemon demands."""
    ids: list[int] = []

    def answer(asked: Asked) -> None:
        ids.append(asked.id)
        asked.reply(STATUS)

    peer.answer = answer
    threads = [in_background(lambda: [client.status() for _ in range(20)]) for _ in range(8)]
    for thread, outcome in threads:
        thread.join()
        assert outcome == [[STATUS] * 20]
    assert len(ids) == 160
    assert ids == sorted(ids)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_async_client_works_on_either_loop(peer: Peer, run: object) -> None:
    """Requests of several tasks are answered on asyncio and on uvloop."""
    peer.answer = lambda asked: asked.reply(STATUS)

    async def ask() -> list[Status]:
        async with AsyncDaemon.connect(peer.endpoint) as daemon:
            return await asyncio.gather(*(daemon.status() for _ in range(10)))

    assert run(ask()) == [STATUS] * 10


def test_use_after_fork_is_refused_and_the_parent_goes_on(peer: Peer, client: Daemon) -> None:
    """The child gets a clear error instead of a hang, may close its copy, and harms nobody."""
    peer.answer = lambda asked: asked.reply(STATUS)
    child = os.fork()
    if child == 0:
        try:
            client.status()
        except UsedAfterFork as error:
            client.close()
            os._exit(0 if "connect anew" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.status() == STATUS
    assert peer.goodbyes == 0


# --- heartbeats, reconnects, restarts ---


def test_heartbeats_come_while_idle(tmp_path: Path) -> None:
    """The lease is renewed without anybody calling."""
    with running(Peer(endpoint_in(tmp_path), heartbeat_seconds=0.05)) as peer, Daemon.connect(peer.endpoint):
        for _ in range(3):
            peer.heartbeats.get(timeout=10)


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
    """A request that finds its session gone says so; the client has a new one by itself."""
    thread, outcome = in_background(client.manifest)
    peer.next(GetManifest).fail(ErrorCode.NO_SESSION)
    thread.join()
    assert isinstance(outcome[0], SessionLost)
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


# --- generation ---


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
