"""The wire: unary calls, idle sessions, the codec, a trainer's death. Server and clients are processes of their own.

The daemon behind the socket is the real server with real sessions, without an engine: nothing else is measured.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import zmq
from scripts.benches.figures import Figure, at_least, at_most

from refit_protocol.codec import decode_reply, encode_reply, encode_request
from refit_protocol.messages import (
    GetStatus,
    Heartbeat,
    Hello,
    ReplyHeader,
    Request,
    RequestHeader,
    Status,
    TokenDelta,
    TokensGenerated,
    VersionRun,
    Welcome,
)
from refit_protocol.states import EngineState

IDLE_SESSIONS = 1000
IDLE_SECONDS = 20.0
UNARY_CALLS = 3000
PIPELINED_CALLS = 30_000
PIPELINE_DEPTH = 64
KILLS = 5


def measure() -> Iterator[Figure]:
    """Each figure as soon as it is known; a minute in all."""
    yield at_most("codec_64_tokens_us", codec_microseconds(), "us", 20)
    with (
        tempfile.TemporaryDirectory(prefix="refitd-bench-") as directory,
        _server(Path(directory)) as (process, endpoint),
    ):
        yield at_most("unary_p50_us", unary_p50_microseconds(endpoint), "us", 200)
        yield at_least("unary_per_second", unary_per_second(endpoint), "1/s", 10_000)
        yield at_most("trainer_kill_noticed_ms", kill_noticed_milliseconds(endpoint), "ms", 500)
        yield at_most("idle_1000_sessions_cpu", idle_percent(process, endpoint), "% of a core", 1)


# --- the codec --------------------------------------------------------------------------------------------------------


def codec_microseconds() -> float:
    """Encode plus decode of one delta of 64 tokens with its logprobs; the best of several rounds."""
    blobs = array("i", range(64)).tobytes(), array("f", [0.5] * 64).tobytes()
    delta = TokenDelta(request=7, prompt=0, output=0, position=128, count=64, versions=[VersionRun(3, 64)])
    header = ReplyHeader(id=0, body=TokensGenerated(deltas=[delta]), last=False)
    return 1e6 * _best_seconds(lambda: decode_reply(encode_reply(header, blobs)))


def _best_seconds(work: Callable[[], object], rounds: int = 15, repeats: int = 2000) -> float:
    def once() -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - begin) / repeats

    return min(once() for _ in range(rounds))


# --- unary calls ------------------------------------------------------------------------------------------------------


class Caller:
    """A bare DEALER with a session: frames of the codec, nothing else."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, pid: int | None = None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self._id = 0
        self.session: str | None = None
        self.send(Hello(protocol_versions=[1], client="bench", pid=pid))
        reply = self.receive().body
        assert isinstance(reply, Welcome), reply
        self.session = reply.session
        self.heartbeat_seconds = reply.heartbeat_seconds

    def send(self, body: Request) -> None:
        self._id += 1
        header = RequestHeader(id=self._id, body=body, session=self.session)
        self.socket.send_multipart([b"", *encode_request(header)])

    def receive(self) -> ReplyHeader:
        return decode_reply(self.socket.recv_multipart()[1:])[0]


def unary_p50_microseconds(endpoint: str) -> float:
    """One call after the other."""
    with zmq.Context() as context:
        caller = Caller(context, endpoint)
        times = [_timed(caller) for _ in range(UNARY_CALLS)]
        caller.socket.close()
    return 1e6 * statistics.median(times)


def _timed(caller: Caller) -> float:
    begin = time.perf_counter()
    caller.send(Heartbeat())
    caller.receive()
    return time.perf_counter() - begin


def unary_per_second(endpoint: str) -> float:
    """Calls of one client that keeps `PIPELINE_DEPTH` under way; every reply is decoded and checked."""
    with zmq.Context() as context:
        caller = Caller(context, endpoint)
        begin = time.perf_counter()
        for _ in range(PIPELINE_DEPTH):
            caller.send(Heartbeat())
        for expected in range(2, PIPELINED_CALLS + 2):
            assert caller.receive().id == expected
            caller.send(Heartbeat())
        seconds = time.perf_counter() - begin
        caller.socket.close()
    return PIPELINED_CALLS / seconds


# --- idle sessions ----------------------------------------------------------------------------------------------------


def idle_percent(server: psutil.Process, endpoint: str) -> float:
    """CPU of the server while a thousand clients do nothing but keep their sessions."""
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, IDLE_SESSIONS + 10)
        callers = [Caller(context, endpoint, pid=os.getpid()) for _ in range(IDLE_SESSIONS)]
        begin, before = time.monotonic(), _cpu_seconds(server)
        _keep_alive(callers, IDLE_SECONDS)
        percent = 100 * (_cpu_seconds(server) - before) / (time.monotonic() - begin)
        for caller in callers:
            caller.socket.close()
    return percent


def _keep_alive(callers: list[Caller], seconds: float) -> None:
    """As many heartbeats as the daemon wants in that time, one by one, as those of independent clients come."""
    begin, pause = time.monotonic(), callers[0].heartbeat_seconds / len(callers)
    for number in range(1, 1 + round(seconds / pause)):
        caller = callers[number % len(callers)]
        caller.send(Heartbeat())
        caller.receive()
        time.sleep(max(0.0, begin + number * pause - time.monotonic()))


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


# --- a trainer's death ------------------------------------------------------------------------------------------------

VICTIM = "import sys; sys.stdin.read()"


def kill_noticed_milliseconds(endpoint: str) -> float:
    """From SIGKILL until the daemon's status counts one session less; the worst of several."""
    with zmq.Context() as context:
        observer = Caller(context, endpoint)
        worst = max(_kill_one(context, endpoint, observer) for _ in range(KILLS))
        observer.socket.close()
    return 1e3 * worst


def _kill_one(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, observer: Caller) -> float:
    victim = subprocess.Popen([sys.executable, "-c", VICTIM], stdin=subprocess.PIPE)
    try:
        session = Caller(context, endpoint, pid=victim.pid)
        with_it = _sessions(observer)
        begin = time.perf_counter()
        victim.send_signal(signal.SIGKILL)
        while _sessions(observer) == with_it:
            time.sleep(0.0005)
        seconds = time.perf_counter() - begin
        session.socket.close()
        return seconds
    finally:
        victim.kill()
        victim.communicate()


def _sessions(observer: Caller) -> int:
    observer.send(GetStatus())
    status = observer.receive().body
    assert isinstance(status, Status)
    return status.sessions


# --- the server -------------------------------------------------------------------------------------------------------


@contextmanager
def _server(directory: Path) -> Iterator[tuple[psutil.Process, str]]:
    directory.chmod(0o700)
    endpoint = f"ipc://{directory}/s"
    command = [sys.executable, "-m", "scripts.benches.wire", endpoint]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield psutil.Process(process.pid), endpoint
    finally:
        process.communicate()


def serve_without_engine(endpoint: str) -> None:
    """Until standard input ends."""
    import logging

    import structlog
    import uvloop

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    uvloop.run(_serve(endpoint))


async def _serve(endpoint: str) -> None:
    from refitd.app import raise_descriptor_limit
    from refitd.config import ServerConfig
    from refitd.server import Server
    from refitd.sessions import Answer, Sessions

    raise_descriptor_limit()
    config = ServerConfig()
    sessions = Sessions(config, 1)
    server = Server(
        config,
        sessions,
        instant={
            Hello: sessions.hello,
            Heartbeat: sessions.heartbeat,
            GetStatus: lambda _call: Answer(_status(len(sessions))),
        },
        lengthy={},
    )
    server.bind(endpoint)
    expiry = asyncio.create_task(sessions.expire())
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    expiry.cancel()
    await sessions.close_all()
    server.close()


def _status(sessions: int) -> Status:
    return Status(
        daemon_version="0",
        pid=os.getpid(),
        epoch=1,
        state=EngineState.READY,
        model=None,
        version=0,
        digest=None,
        digest_mode="off",
        sleep_level=0,
        asleep_tags=[],
        progress=1.0,
        sessions=sessions,
        writer=None,
        running_requests=0,
        waiting_requests=0,
        restorable_version=None,
        last_refit=None,
        last_error=None,
        uptime_seconds=0.0,
        logprobs_mode="",
    )


if __name__ == "__main__":
    serve_without_engine(sys.argv[1])
