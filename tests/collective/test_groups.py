"""Groups that cannot be formed, and groups that break: clear errors in bounded time, the engine unharmed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import CollectiveJoined
from refit_protocol.states import EngineState
from refit_trainer import AsyncDaemon, BroadcastGroup, Daemon, NotShareable, RefitdError
from refit_trainer.process_group import Listener, terms_of
from tests.canary import unharmed
from tests.cases.test_torn import wait_for
from tests.cases.test_updates import tensors_of
from tests.conftest import GREEDY, PROMPT
from tests.daemon_process import DaemonProcess
from tests.ports import reserved_port
from tests.trainers import killing_itself_after, specs_of
from tests.waiting import until

CPU = torch.device("cpu")
SECONDS = 1.0
SMALL_PIECES = 16 << 10
IN_THE_MIDDLE = 12
REJOINS = 8


def join(process: DaemonProcess, port: int, world_size: int = 2, first_rank: int = 1) -> CollectiveJoined:
    """The daemon's side alone."""

    async def ask() -> CollectiveJoined:
        async with AsyncDaemon.connect(process.endpoint) as daemon:
            await daemon.acquire_writer(takeover=True)
            return await daemon.join_collective("127.0.0.1", port, world_size, first_rank, timeout_seconds=SECONDS)

    return asyncio.run(ask())


def refusal(process: DaemonProcess, port: int, world_size: int = 2, first_rank: int = 1) -> RefitdError:
    with pytest.raises(RefitdError) as refused:
        join(process, port, world_size, first_rank)
    return refused.value


@contextmanager
def hosting(world_size: int, seconds: float = SECONDS) -> Iterator[int]:
    """A trainer that waits for its group; its own outcome, an error, comes in bounded time too."""
    listener = Listener("127.0.0.1", 0)
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(BroadcastGroup.hosted, listener, terms_of(world_size, CPU, 128), CPU, seconds, stopped)
        yield listener.port
        with pytest.raises(RefitdError):
            waiting.result()


# --- never formed -----------------------------------------------------------------------------------------------------


def test_a_port_where_nobody_listens(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    with unharmed(daemon), reserved_port() as port:
        error = refusal(daemon_process, port)
    assert error.code is ErrorCode.COLLECTIVE_FAILED
    assert "cannot be reached" in error.message


def test_a_port_where_somebody_else_listens(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """It takes the connection and says nothing: the daemon gives up by itself, and serves meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool, unharmed(daemon):
        asking = pool.submit(refusal, daemon_process, silent.getsockname()[1])
        daemon.generate_one(PROMPT, GREEDY)
        error = asking.result()
    assert error.code is ErrorCode.COLLECTIVE_FAILED
    assert "not complete within" in error.message


def test_a_plain_torch_distributed_group(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """The trainer called init_process_group by itself: it is told what to use instead."""
    with unharmed(daemon):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        error = refusal(daemon_process, store.port)
    assert error.code is ErrorCode.COLLECTIVE_FAILED
    assert "plain torch.distributed" in error.message


@pytest.mark.parametrize("told", [2, 4])
def test_a_wrong_world_size(daemon: Daemon, daemon_process: DaemonProcess, told: int) -> None:
    """Both sides learn at once that they were told different sizes."""
    with unharmed(daemon), hosting(3, seconds=60.0) as port:
        error = refusal(daemon_process, port, world_size=told)
    assert error.code is ErrorCode.COLLECTIVE_FAILED
    assert f"told of {told} ranks, but the group has 3" in error.message


def test_a_missing_rank_is_named(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    with unharmed(daemon), hosting(4, seconds=60.0) as port:
        error = refusal(daemon_process, port, world_size=4, first_rank=2)
    assert error.code is ErrorCode.COLLECTIVE_FAILED
    assert error.details["missing"] == [1, 3]


def test_a_rank_that_is_there_twice(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    with unharmed(daemon), hosting(3, seconds=60.0) as port, ThreadPoolExecutor(1) as pool:
        other = pool.submit(BroadcastGroup.join, "127.0.0.1", port, 1, 3)
        error = refusal(daemon_process, port, world_size=3)
        with pytest.raises(RefitdError, match="two members have rank 1"):
            other.result()
    assert error.code is ErrorCode.COLLECTIVE_FAILED
    assert "two members have rank 1" in error.message


@pytest.mark.parametrize(("first_rank", "world_size"), [(0, 2), (2, 2), (-1, 2), (1, 1)])
def test_ranks_that_cannot_be(daemon: Daemon, daemon_process: DaemonProcess, first_rank: int, world_size: int) -> None:
    with unharmed(daemon):
        error = refusal(daemon_process, 1, world_size, first_rank)
    assert error.code is ErrorCode.INVALID_DESCRIPTOR


@pytest.mark.parametrize("bucket_bytes", [100, (1 << 30) + 64])
def test_pieces_of_impossible_size(daemon: Daemon, bucket_bytes: int) -> None:
    with unharmed(daemon), pytest.raises(RefitdError) as refused:
        daemon.collective(bucket_bytes=bucket_bytes, timeout_seconds=2)
    assert refused.value.code is ErrorCode.COLLECTIVE_FAILED


def test_a_patience_that_cannot_be(daemon: Daemon) -> None:
    with unharmed(daemon), pytest.raises(RefitdError):
        daemon.collective(timeout_seconds=1e6)


def test_a_plain_process_group_is_no_address(daemon: Daemon) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with unharmed(daemon), pytest.raises(NotShareable, match="plain process group"):
            daemon.collective(dist.group.WORLD)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


def test_a_session_that_ends_while_its_group_forms(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """The waiting ends with it: the next writer is not held up."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool, unharmed(daemon):
        asking = pool.submit(refusal, daemon_process, silent.getsockname()[1])
        connection, _ = silent.accept()
        daemon.acquire_writer(takeover=True)
        assert asking.result().code in (ErrorCode.UNKNOWN_SOURCE, ErrorCode.COLLECTIVE_FAILED)
        connection.close()
    with daemon.collective() as group:
        group.refit(tensors_of(0))


# --- broken -----------------------------------------------------------------------------------------------------------


def start_suicidal_trainer(endpoint: str) -> subprocess.Popen[bytes]:
    """A trainer that is killed in the middle of its broadcasts."""
    command = [sys.executable, "-m", "tests.collective.test_groups", endpoint]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL)


def test_init_kill_init(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """A trainer killed while it broadcasts: what was kept is served again, and another trainer's group works
    (trl#3408)."""
    with daemon.collective() as group:
        group.refit(tensors_of(0))
    daemon.release_writer()
    with unharmed(daemon):
        assert start_suicidal_trainer(daemon_process.endpoint).wait(120) == -signal.SIGKILL
        wait_for(daemon, EngineState.READY)
        error = daemon.status().last_error
        assert error is not None
    with daemon.collective() as group:
        group.refit(tensors_of(1))
    assert daemon.verify(tensors_of(1), full=True)


def test_a_trainer_that_is_stopped_ends_in_bounded_time(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """It joined and then says nothing: the refit fails after the group's patience; the engine lives on."""
    with (
        daemon_process.connect() as watching,
        daemon.collective(bucket_bytes=SMALL_PIECES, timeout_seconds=4.0) as group,
    ):
        group.refit(tensors_of(0))

        def stalling() -> Iterator[tuple[str, torch.Tensor]]:
            for index, named in enumerate(tensors_of(1).items()):
                if index == IN_THE_MIDDLE:
                    # As long as the workers wait, while nothing is sent.
                    until(lambda: watching.status().state is not EngineState.REFITTING, "the workers to give up")
                yield named

        before = daemon.status()
        with pytest.raises(RefitdError) as failed:
            group.refit(stalling(), specs_of())
        assert failed.value.code is ErrorCode.COLLECTIVE_FAILED
    wait_for(daemon, EngineState.READY)
    assert (daemon.status().version, daemon.status().digest) == (before.version, before.digest)


def test_groups_made_anew_leave_descriptors_and_threads_flat(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """Of trainer, daemon and engine, after each group has had its end."""
    processes = [
        psutil.Process(pid) for pid in (os.getpid(), daemon_process.process.pid, *daemon_process.engine_pids())
    ]

    def usage() -> tuple[int, int]:
        return sum(process.num_fds() for process in processes), sum(process.num_threads() for process in processes)

    def remake(times: int) -> None:
        for _ in range(times):
            with daemon.collective() as group:
                group.refit(tensors_of(0))

    remake(2)
    before = settled(usage)
    remake(REJOINS)
    after = settled(usage)
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def settled(usage: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """What is left once it stops falling: groups end in the background."""
    found = usage()
    quiet = 0
    while quiet < 10:
        threading.Event().wait(0.1)
        now = usage()
        quiet = quiet + 1 if now >= found else 0
        found = min(found, now)
    return found


def main(endpoint: str) -> None:
    with Daemon.connect(endpoint, client="suicidal") as daemon, daemon.collective(bucket_bytes=SMALL_PIECES) as group:
        group.refit(killing_itself_after(1, IN_THE_MIDDLE), specs_of())


if __name__ == "__main__":
    main(*sys.argv[1:])
