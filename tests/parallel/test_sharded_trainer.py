"""A trainer under FSDP2 whose ranks lend their shards to an engine of two tensor-parallel workers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from refit_protocol.states import EngineState
from refit_trainer import Daemon
from tests.daemon_process import DaemonProcess
from tests.parallel.engines import Said, said

WORLD_SIZE = 2

pytestmark = pytest.mark.slow


class Ranks:
    """The processes of the trainer; `tell` has all of them do one thing and returns what each answers."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def tell(self, phase: str) -> list[dict[str, Any]]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{phase}\n")
            process.stdin.flush()
        answers = [self._answer(process) for process in self.processes]
        assert not any("error" in answer for answer in answers), answers
        return answers

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait()

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"a rank ended with {process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def started(endpoint: str, directory: Path) -> Iterator[Ranks]:
    with ExitStack() as stack:
        processes = []
        for rank in range(WORLD_SIZE):
            command = [sys.executable, "-m", "tests.parallel.sharded_trainer", endpoint, str(directory), str(rank), "2"]
            process = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(ended, process)
            processes.append(process)
        yield Ranks(processes)


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def ranks(two_ranks: DaemonProcess, fresh: Said, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    assert fresh
    with started(two_ranks.endpoint, tmp_path_factory.getbasetemp()) as running:
        yield running


@pytest.fixture
def daemon(two_ranks: DaemonProcess) -> Iterator[Daemon]:
    with two_ranks.connect() as connected:
        yield connected


def test_training_goes_on_in_shared_memory_and_the_engine_follows(
    daemon: Daemon, ranks: Ranks, fresh: Said, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two steps of AdamW after sharing are bit for bit those of a twin that shares nothing; every refit brings exactly
    the sharded weights, uneven shards of an odd vocabulary too; all ranks get one report."""
    file = tmp_path_factory.getbasetemp() / "weights.pt"
    digests = set()
    for step in range(3):
        if step:
            assert ranks.tell("train") == [{"equal": True}] * WORLD_SIZE
        reports = ranks.tell("refit")
        assert reports[0] == reports[1]
        assert reports[0]["path"] == "plan"
        ranks.tell("save")
        whole = torch.load(file)
        assert daemon.status().version == reports[0]["version"]
        assert daemon.verify(whole, full=True)
        digests.add(reports[0]["digest"])
        assert (said(daemon) == fresh) is (step == 0)
    assert len(digests) == 3


def test_the_engine_says_what_a_fresh_one_says(daemon: Daemon, ranks: Ranks, fresh: Said) -> None:
    """O1: back at the weights that the engine was started on, ids and logprobs are those it started with."""
    ranks.tell("load")
    ranks.tell("refit")
    assert said(daemon) == fresh


def test_a_dead_rank_closes_the_source_and_nothing_else(
    two_ranks: DaemonProcess, daemon: Daemon, ranks: Ranks, fresh: Said
) -> None:
    """The engine serves on, the role is free once the other ranks have ended too."""
    version = daemon.status().version
    for rank in reversed(range(WORLD_SIZE)):
        ranks.kill(rank)
    while daemon.status().writer is not None:
        assert two_ranks.process.poll() is None
    status = daemon.status()
    assert (status.state, status.version) == (EngineState.READY, version)
    assert said(daemon) == fresh
