"""Two replicas of the engine: a refit reaches both, or neither serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from refit_trainer import Daemon, Sampling
from tests.conftest import GREEDY, PROMPT
from tests.daemon_process import DaemonProcess
from tests.parallel.engines import Said, load, parallel_daemon, said, shared_model

# vLLM gives each new request to the replica with fewer: of so many at once both get some.
ENOUGH_FOR_BOTH = 8

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_replicas(short_directory: Path) -> Iterator[DaemonProcess]:
    with parallel_daemon(short_directory / "dp", "qwen3", "engine.data_parallel_size=2") as process:
        yield process


@pytest.fixture(scope="module")
def fresh(two_replicas: DaemonProcess) -> Said:
    """What the engine says as it was started, on weights A."""
    with two_replicas.connect() as connected:
        assert connected.status().version == 0
        return said(connected)


@pytest.fixture
def daemon(two_replicas: DaemonProcess, fresh: Said) -> Iterator[Daemon]:
    with two_replicas.connect() as connected:
        yield connected


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return shared_model()


def said_by_all(daemon: Daemon) -> set[tuple[int, tuple[int, ...]]]:
    """The distinct answers, with their versions, of as many requests at once as keep both replicas busy."""
    samples = list(daemon.generate([PROMPT] * ENOUGH_FOR_BOTH, GREEDY))
    return {(sample.version, tuple(sample.token_ids.tolist())) for sample in samples}


def test_every_replica_is_refitted(daemon: Daemon, model: PreTrainedModel, fresh: Said) -> None:
    """O1 on both: after A, B, A all requests, wherever they run, say the same, of the one version that was reported."""
    assert len(daemon.status().devices) == 2
    for seed in (0, 1, 0):
        load(model, seed)
        version = daemon.refit(model).version
        assert daemon.verify(model, full=True)
        ids, _ = said(daemon)
        assert said_by_all(daemon) == {(version, tuple(ids))}
    assert said(daemon) == fresh


def test_requests_of_all_replicas_stand_still_during_a_refit(daemon: Daemon, model: PreTrainedModel) -> None:
    """Streams on both replicas change their version at one token each, none is lost, all end under the new one."""
    streams = [daemon.stream([PROMPT], Sampling(max_tokens=200, ignore_eos=True)) for _ in range(ENOUGH_FOR_BOTH)]
    received = [[next(stream)] for stream in streams]
    version = daemon.refit(model, policy="keep").version
    for deltas, stream in zip(received, streams, strict=True):
        deltas += list(stream)
        runs = [run for delta in deltas for run in delta.versions]
        assert sum(run.count for run in runs) == 200
        assert [run.version for run in runs] == sorted(run.version for run in runs)
        assert {run.version for run in runs} <= {version - 1, version}
