"""What a trainer does beside the service, run inside its namespaces: `python -m tests.service.client WHAT`.

Each prints one line, which is the result, and more where the test has to know that it is under way.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections import Counter

import msgspec

from refit_protocol.messages import Generate
from refit_trainer import Daemon, RefitdError, Sampling
from tests.server.raw_client import raw_client

ENDPOINT = "ipc:///run/refitd/refitd.sock"
PROMPT = [5, 60, 7, 400, 9]
STREAMS = 400


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def status() -> None:
    """The status as JSON."""
    with Daemon.connect(os.environ.get("REFITD_ENDPOINT", ENDPOINT)) as daemon:
        say(msgspec.json.encode(daemon.status()).decode())


def work() -> None:
    """One refit from this process's memory and a generation with it: how many tokens, of which version."""
    from refit_trainer import share_parameters
    from tests.worker.models import random_model

    with Daemon.connect(ENDPOINT) as daemon:
        report = daemon.refit(share_parameters(random_model("qwen3", seed=3)))
        sample = daemon.generate_one(PROMPT, Sampling(max_tokens=8, ignore_eos=True))
        say(f"{report.version} {len(sample.token_ids)} {sample.version}")


def stream() -> None:
    """More work than the daemon may drain: `started`, whether new work is taken after it began, how the old ended."""
    with Daemon.connect(ENDPOINT) as daemon:
        sampling = Sampling(max_tokens=200, ignore_eos=True)
        # Before the work of a client that stalls, which would take minutes.
        deltas = daemon.stream([PROMPT] * STREAMS, sampling, priority=-1, incomplete="yield")
        next(deltas)
        say("started")
        sys.stdin.readline()
        say(refusal_of_new_work(daemon))
        ends = Counter(f"{delta.finish_reason} {delta.error}" for delta in deltas if delta.finish_reason)
        say(msgspec.json.encode(ends).decode())


def stall() -> None:
    """Asks for much and reads nothing of it: `started`, and then silence until standard input ends.

    Each step's tokens have many alternatives, so that even those of the first prompts are more than it is sent unread.
    """
    prompts = array("i", PROMPT * STREAMS).tobytes()
    sampling = Sampling(max_tokens=200, ignore_eos=True, logprobs=20)
    with raw_client(ENDPOINT, receive_queue=1) as client:
        client.hello(pid=os.getpid())
        client.send(Generate(prompt_lengths=[len(PROMPT)] * STREAMS, sampling=sampling, stream=True), [prompts])
        client.receive()
        say("started")
        sys.stdin.read()


def refusal_of_new_work(daemon: Daemon) -> str:
    try:
        daemon.generate_one(PROMPT, Sampling(max_tokens=1))
    except RefitdError as error:
        return f"refused {error.code}"
    return "accepted"


if __name__ == "__main__":
    {"status": status, "work": work, "stream": stream, "stall": stall}[sys.argv[1]]()
