"""Two tensor-parallel workers under vLLM's Ray executor: Ray's actors are called and written like other workers.

Ray is no dependency of refitd: `pip install ray` in the environment of the tests runs these.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs Ray, on which refitd does not depend")

from refit_trainer import Daemon
from tests.daemon_process import DaemonProcess
from tests.parallel.engines import Said, load, parallel_daemon, said, shared_model

EXECUTOR = "engine.extra.distributed_executor_backend=tests.parallel.ray_on_cpu.RayOnCpu"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray_engine(short_directory: Path) -> Iterator[DaemonProcess]:
    with parallel_daemon(short_directory / "ray", "qwen3", "engine.tensor_parallel_size=2", EXECUTOR) as process:
        yield process


@pytest.fixture(scope="module")
def loaded(ray_engine: DaemonProcess) -> Said:
    """What it says on the weights it was started on."""
    with ray_engine.connect() as connected:
        assert connected.status().version == 0
        return said(connected)


@pytest.fixture
def daemon(ray_engine: DaemonProcess, loaded: Said) -> Iterator[Daemon]:
    assert loaded
    with ray_engine.connect() as connected:
        yield connected


def test_actors_are_found_and_have_lines_of_their_own(ray_engine: DaemonProcess, daemon: Daemon) -> None:
    """Both are processes of this machine, and neither failed to connect to the daemon's socket."""
    assert len(actor_pids(ray_engine)) == len(daemon.status().devices) == 2
    assert "no direct lines" not in ray_engine.log.read_text()


def test_in_place_refits_are_exact(daemon: Daemon, loaded: Said) -> None:
    """Out of shared memory into Ray's actors, first through vLLM's call and then over the lines."""
    model = shared_model()
    for seed in (1, 0, 1, 0):
        load(model, seed)
        report = daemon.refit(model, attest="full")
        assert report.path == "plan"
        assert daemon.verify(model, full=True)
        assert (said(daemon) == loaded) is (seed == 0)


def test_bucket_refits_are_exact(ray_engine: DaemonProcess, loaded: Said) -> None:
    """In buckets that cut rows."""
    model = shared_model()
    with ray_engine.connect(bucket_bytes=24_000) as daemon:
        for seed in (1, 0):
            load(model, seed)
            daemon.refit(iter(model.named_parameters()))
            assert daemon.verify(model, full=True)
        assert said(daemon) == loaded


def actor_pids(process: DaemonProcess) -> list[int]:
    return [pid for pid in process.engine_pids() if b"WorkerOnCpu" in Path(f"/proc/{pid}/cmdline").read_bytes()]
