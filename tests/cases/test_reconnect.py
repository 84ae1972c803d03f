"""Cases D and J on the real engine: connections that break, clients that die, and every published hostile message."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from transformers import PreTrainedModel

from refit_protocol.messages import (
    Failed,
    GenerationFinished,
    GenerationResumed,
    ResumeGeneration,
    StreamCursor,
    TokensGenerated,
)
from refit_trainer import Daemon
from tests.canary import unharmed
from tests.conftest import load_seed
from tests.daemon_process import DaemonProcess, standing_still
from tests.parallel.engines import wait_until_refitting
from tests.protocol.vectors import frames_of, read_vectors
from tests.server.raw_client import raw_client, take_tokens

LONG = 240
PATIENCE_SECONDS = 60.0

DOOMED = """
import os, sys
sys.path[:0] = sys.argv[2:]
from tests.server.raw_client import RawClient
client = RawClient(sys.argv[1])
client.hello(pid=os.getpid())
for _ in range(20): client.generate(240)
while client.receive()[0].id: pass
print("tokens", flush=True)
sys.stdin.read()
"""


def test_stream_goes_on_after_a_reconnect_with_a_refit_in_between(
    daemon: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel
) -> None:
    """Nothing is missing or doubled behind the cursor, and every token says which weights made it."""
    # With its source open, the next refit needs nothing of the engine before it shuts the gate.
    before = daemon.refit(model).version
    load_seed(model, 21)
    with raw_client(daemon_process.endpoint) as lost:
        token = lost.hello().session
        stream = lost.generate(LONG)
        while not isinstance(lost.receive()[0].body, TokensGenerated):
            pass
    with ThreadPoolExecutor(1) as pool, standing_still(*daemon_process.engine_pids()):
        refit = pool.submit(daemon.refit, model, policy="keep")
        wait_until_refitting(daemon, refit)
    report = refit.result()
    with raw_client(daemon_process.endpoint) as client:
        client.last = stream
        assert client.hello(resume=token).resumed
        resume = ResumeGeneration(request=stream, cursors=[StreamCursor(prompt=0, output=0, position=1)])
        client.ask(resume, GenerationResumed)
        runs: list[tuple[int, int]] = []
        tokens: dict[int, list[int]] = {stream: [0]}
        while True:
            header, blobs = client.replies.pop(0) if client.replies else client.receive()
            assert isinstance(header.body, TokensGenerated | GenerationFinished), header
            take_tokens(tokens, header.body, blobs)
            runs += [(run.version, run.count) for delta in header.body.deltas for run in delta.versions]
            if isinstance(header.body, GenerationFinished):
                break
    assert len(tokens[stream]) == sum(count for _, count in runs) + 1
    versions = [version for version, _ in runs]
    assert versions == sorted(versions)
    assert {versions[0], versions[-1]} == {before, report.version}


def test_killed_client_leaves_the_engine(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """Its requests stop running long before its lease ends, and others are served as before."""
    with unharmed(daemon):
        client = subprocess.Popen(
            [sys.executable, "-c", DOOMED, daemon_process.endpoint, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "tokens\n"
            client.kill()
            await_idle(daemon)
        finally:
            client.kill()
            client.communicate()


def await_idle(daemon: Daemon) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while daemon.status().running_requests:
        assert time.monotonic() < deadline, "requests of a dead client still run"


def test_every_published_hostile_message_is_refused(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """One typed reply each, in order, from one connection; the canary sings on."""
    with unharmed(daemon), raw_client(daemon_process.endpoint) as client:
        for vector in read_vectors("invalid_requests"):
            client.send_frames(b"", *frames_of(vector))
            body = client.receive()[0].body
            assert isinstance(body, Failed), vector["name"]
            assert body.code == vector["code"], vector["name"]
