"""Several ranks that refit together, against a peer that answers them when it is told to."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AcquireWriter,
    CommitRefit,
    OpenSource,
    RefitCommitted,
    ReleaseWriter,
    SourceOpened,
    WriterAcquired,
    WriterReleased,
)
from tests.trainer.granted import REPORT
from tests.trainer.peer import Asked, Peer, endpoint_in, running

WORLD_SIZE = 2

Ranks = list[subprocess.Popen[str]]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with running(Peer(endpoint_in(tmp_path_factory.mktemp("ranks")))) as started:
        yield started


@pytest.fixture(scope="module")
def ranks(peer: Peer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Connected, with nothing asked yet."""
    directory = tmp_path_factory.mktemp("rendezvous")
    with ExitStack() as stack:
        processes = [start(peer, directory, rank, stack) for rank in range(WORLD_SIZE)]
        assert [said(process) for process in processes] == ["connected"] * WORLD_SIZE
        yield processes


def start(peer: Peer, directory: Path, rank: int, stack: ExitStack) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.lending_rank", peer.endpoint, str(directory), str(rank), str(WORLD_SIZE)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        process.kill()
        process.communicate()

    stack.callback(end)
    return process


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()


def begin_refit(ranks: Ranks) -> None:
    for process in ranks:
        tell(process, "refit")


def grant(asked: Asked) -> None:
    asked.reply(WriterAcquired(epoch=6 + asked.peer.epoch))


def announced_commits(peer: Peer) -> list[Asked]:
    """Of all ranks, after whatever they ask for before."""
    commits: list[Asked] = []
    while len(commits) < WORLD_SIZE:
        asked = peer.next()
        if isinstance(asked.body, AcquireWriter):
            grant(asked)
        elif isinstance(asked.body, OpenSource):
            asked.reply(SourceOpened(source=1, path="plan", tensors=1, size_bytes=1, unplanned=[]))
        else:
            assert isinstance(asked.body, CommitRefit), asked.body
            commits.append(asked)
    return commits


def commit_all(peer: Peer, ranks: Ranks) -> None:
    begin_refit(ranks)
    for asked in announced_commits(peer):
        asked.reply(RefitCommitted(report=REPORT))
    assert [said(process) for process in ranks] == ["4", "4"]


def restart(peer: Peer) -> None:
    """Returns when every rank has come back."""
    peer.stop()
    peer.epoch += 1
    greeted = len(peer.hellos)
    peer.start()
    seen = greeted
    while len({hello.client for hello in peer.hellos[greeted:seen]}) < WORLD_SIZE:
        seen += 1
        peer.wait_for_hellos(seen)


@pytest.mark.parametrize("told", [False, True], ids=["untold", "rank 0 was told"])
def test_restart_is_told_on_all_ranks_at_once(peer: Peer, ranks: Ranks, *, told: bool) -> None:
    """Each rank's connection has it to tell. None waits for another that has stopped at it; the next refit succeeds."""
    commit_all(peer, ranks)
    restart(peer)
    if told:
        tell(ranks[0], "manifest")
        assert said(ranks[0]) == "DaemonRestarted"
    begin_refit(ranks)
    if told:
        grant(peer.next(AcquireWriter))
    assert [said(process) for process in ranks] == ["DaemonRestarted", "DaemonRestarted"]
    assert peer.asked.empty()
    commit_all(peer, ranks)


def test_interrupted_rank_takes_its_memory_back(peer: Peer, ranks: Ranks) -> None:
    """A rank that is no writer leaves the group by the same word, before its caller may write to the memory again."""
    begin_refit(ranks)
    commits = announced_commits(peer)
    ranks[1].send_signal(signal.SIGINT)
    released = peer.next(ReleaseWriter)
    (first,) = (asked for asked in commits if asked.identity != released.identity)
    first.fail(ErrorCode.GROUP_INCOMPLETE)
    assert said(ranks[0]) == "RefitdError"
    released.reply(WriterReleased())
    assert said(ranks[1]) == "KeyboardInterrupt"
