"""Clients that open, ask, are used from many threads, and close, against a peer that does what it is told."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from refit_protocol.awake import awake
from refit_protocol.errors import ErrorCode, Fault
from refit_protocol.messages import Generate, GetDigest, GetManifest, GetStatus, Manifest, Status, WeightsDigest
from refit_trainer import (
    AsyncDaemon,
    ClientClosed,
    Daemon,
    DaemonUnreachable,
    RefitdError,
    RequestTimedOut,
    UsedAfterFork,
    aio,
)
from refit_trainer.client import LoopThread
from refit_trainer.daemon_refit import AWAKE_SECONDS
from refit_trainer.prompts import GenerateOptions
from refit_trainer.refits import RefitOptions
from tests.trainer.background import in_background
from tests.trainer.peer import MODEL, PATIENCE_SECONDS, STATUS, Asked, Peer, endpoint_in
from tests.waiting import until

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
        Daemon.connect(peer.endpoint, timeout_seconds=PATIENCE_SECONDS)
    assert caught.value.code is ErrorCode.SESSION_LIMIT
    assert (caught.value.fault, caught.value.retryable) == (Fault.DAEMON, True)


def test_path_too_long_is_refused_before_connecting() -> None:
    """libzmq would cut it off."""
    with pytest.raises(ValueError, match="at most 107"):
        Daemon.connect("ipc:///" + "x" * 107)


def threads_and_descriptors() -> tuple[int, int]:
    """Of this process; what earlier tests left behind does not count."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def test_failed_connect_leaves_nothing(tmp_path: Path) -> None:
    """No thread and no descriptor stays behind, but for the pipe that a process' first uvloop opens for good."""
    with pytest.raises(DaemonUnreachable):
        Daemon.connect(endpoint_in(tmp_path), timeout_seconds=0.05)
    before = threads_and_descriptors()
    for _ in range(3):
        with pytest.raises(DaemonUnreachable):
            Daemon.connect(endpoint_in(tmp_path), timeout_seconds=0.05)
    assert threads_and_descriptors() == before


def test_close_says_goodbye_and_leaves_nothing(peer: Peer) -> None:
    """The session ends at once, and so do thread and sockets; closing twice is harmless."""
    before = threads_and_descriptors()
    client = Daemon.connect(peer.endpoint)
    client.close()
    client.close()
    assert peer.goodbyes == 1
    # The peer, here in this process, closes its end of the connection a moment later.
    until(lambda: threads_and_descriptors() == before, "the connection's end")
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
        daemon = await AsyncDaemon.connect(peer.endpoint)
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


def test_unanswered_request_times_out_and_its_late_reply_answers_nobody(
    peer: Peer, client: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request gets its own reply, not the one before."""
    with monkeypatch.context() as impatient:
        impatient.setattr(client._daemon, "_timeout_seconds", 0.1)
        with pytest.raises(RequestTimedOut, match=r"GetStatus.*0.1 s"):
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


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", None])
def test_the_openai_base_url_is_never_none(peer: Peer, url: str | None) -> None:
    """An OpenAI client that is given None sends its prompts to OpenAI: where the endpoint is off, it is an error."""
    peer.answer = lambda asked: asked.reply(msgspec.structs.replace(STATUS, http_url=url))
    with Daemon.connect(peer.endpoint) as client:
        if url is not None:
            assert client.openai_base_url() == url
            return
        with pytest.raises(RefitdError, match=r"http\.enabled") as refused:
            client.openai_base_url()
    assert refused.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 0.0), ("GPU-1", AWAKE_SECONDS["cuda"])])
def test_the_digest_of_a_gpu_is_awaited_awake(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, device: str, seconds: float
) -> None:
    """It takes milliseconds, while a CPU needs its cores. What the engine runs on is asked for once."""
    asked_for: list[str] = []
    awake_for: list[float] = []

    def answer(asked: Asked) -> None:
        asked_for.append(type(asked.body).__name__)
        if isinstance(asked.body, GetDigest):
            asked.reply(WeightsDigest(version=3, mode=asked.body.mode, digest="0"))
        else:
            asked.reply(msgspec.structs.replace(STATUS, devices=[device]))

    def noted(seconds: float) -> AbstractContextManager[None]:
        awake_for.append(seconds)
        return awake(seconds)

    peer.answer = answer
    monkeypatch.setattr(aio, "awake", noted)
    with Daemon.connect(peer.endpoint) as client:
        assert [client.digest(mode).mode for mode in ("sampled", "full")] == ["sampled", "full"]
    assert asked_for == ["GetStatus", "GetDigest", "GetDigest"]
    assert awake_for == [seconds, seconds]


@pytest.mark.parametrize("client_class", [Daemon, AsyncDaemon])
def test_help_names_every_option(client_class: type) -> None:
    """They come as keyword arguments of a typed dictionary, which `help()` does not look into."""
    for method, options in ((client_class.generate, GenerateOptions), (client_class.refit, RefitOptions)):
        said = inspect.getdoc(method) or ""
        assert [name for name in sorted(options.__optional_keys__) if f"`{name}`" not in said] == []
