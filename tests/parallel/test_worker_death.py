"""A worker of a parallel engine that dies takes the engine along, and nobody waits for it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from refit_protocol.errors import ErrorCode
from refit_trainer import RefitdError
from refitd.app import ExitCode
from tests.daemon_process import DaemonProcess, stop
from tests.parallel.engines import Said, shared_model, wait_until_refitting, worker_pids

pytestmark = pytest.mark.slow


def test_a_killed_rank_ends_the_daemon(two_ranks: DaemonProcess, fresh: Said) -> None:
    """A rank that dies in the middle of a commit: the trainer is told, and the daemon ends by itself with the exit
    code for a dead engine, its other processes with it. It costs the engine, so it is the last to use it."""
    assert fresh
    model = shared_model()
    with two_ranks.connect() as daemon, two_ranks.connect() as looking, ThreadPoolExecutor(1) as pool:
        daemon.refit(model)
        victim = worker_pids(two_ranks)[1]
        stop(victim)
        refit = pool.submit(daemon.refit, model)
        wait_until_refitting(looking, refit)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(RefitdError) as failed:
            refit.result()
        assert failed.value.code is ErrorCode.ENGINE_DEAD
        assert two_ranks.process.wait(60) == ExitCode.ENGINE_DIED
    assert two_ranks.engine_pids() == []
