"""How far a load is: told by the workers through files, since they answer no call meanwhile."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import Status
from refit_protocol.states import EngineState
from refit_trainer import RefitdError, RequestTimedOut
from refitd import load_progress
from refitd.load_progress import PROGRESS_VARIABLE, LoadProgress, ProgressFile
from tests.daemon_process import DaemonProcess, ended, start_daemon

STARTUP_EXIT = 3


def test_a_load_begins_at_nothing_and_ends_at_one(tmp_path: Path) -> None:
    """What an earlier run left does not count."""
    (tmp_path / "load-progress.1").write_text("1.0000")
    environment: dict[str, str] = {}
    load_progress.prepare(environment, tmp_path)
    assert environment == {PROGRESS_VARIABLE: str(tmp_path)}
    assert LoadProgress(tmp_path).read() == 0.0
    progress = ProgressFile(tmp_path, total_bytes=1000)
    progress.add(250)
    assert LoadProgress(tmp_path).read() == pytest.approx(0.25)
    progress.add(10_000)
    assert LoadProgress(tmp_path).read() < 1.0
    progress.done()
    assert LoadProgress(tmp_path).read() == 1.0
    load_progress.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_slowest_worker_counts(tmp_path: Path) -> None:
    (tmp_path / "load-progress.1").write_text("0.9000")
    (tmp_path / "load-progress.2").write_text("0.3000")
    assert LoadProgress(tmp_path).read() == pytest.approx(0.3)


def test_a_worker_that_begins_late_takes_nothing_back(tmp_path: Path) -> None:
    progress = LoadProgress(tmp_path)
    for worker, fraction, read in ((1, "0.5000", 0.5), (2, "0.1000", 0.5), (2, "0.6000", 0.5), (1, "0.7000", 0.6)):
        (tmp_path / f"load-progress.{worker}").write_text(fraction)
        assert progress.read() == pytest.approx(read)


def test_a_reader_never_finds_less_than_before(tmp_path: Path) -> None:
    """However its looks fall between the writes."""
    steps = 2000

    def load() -> None:
        progress = ProgressFile(tmp_path, total_bytes=steps)
        for _ in range(steps):
            progress.add(1)

    seen = []
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        while not loading.done():
            seen.append(LoadProgress(tmp_path).read())
        loading.result()
    assert seen == sorted(seen)
    load_progress.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_does_not_hinder_the_load(tmp_path: Path) -> None:
    progress = ProgressFile(tmp_path / "not-there", total_bytes=100)
    progress.add(50)
    progress.done()


def test_a_deferred_load_is_watched_until_it_is_ready(started_daemon: tuple[DaemonProcess, list[Status]]) -> None:
    """The status is answered all the while, its progress never goes back, and its phases come in their order."""
    _, seen = started_daemon
    progress = [status.progress for status in seen]
    assert progress == sorted(progress)
    phases = [status.load_phase for status in seen if status.state is EngineState.LOADING]
    assert phases[0] == "starting the engine"
    assert phases[-1] == "warming up"
    assert (seen[-1].state, seen[-1].progress, seen[-1].load_phase) == (EngineState.READY, 1.0, None)


def exit_code(endpoint: str, *arguments: str) -> int:
    command = [sys.executable, "-m", "refitd", "status", "--endpoint", endpoint, *arguments]
    return subprocess.run(command, capture_output=True, timeout=100, check=False).returncode


def test_a_probe_passes_only_where_the_engine_serves(daemon_process: DaemonProcess, tmp_path: Path) -> None:
    """See the next test for a daemon that answers and has no model; here is one that serves, and none."""
    assert exit_code(daemon_process.endpoint, "--ready") == 0
    assert exit_code(f"ipc://{tmp_path}/none", "--ready") == 1


def test_a_deferred_load_that_fails_says_why_and_ends_the_daemon(
    model_path: Path, short_directory: Path, model: PreTrainedModel
) -> None:
    """Who asked for it gets the reason, and the supervisor the exit code of a start that failed.

    A refit that comes before the load is refused, and does the daemon no harm.
    """
    settings = ("defer_load=true", "engine.cpu_kv_cache_gib=1000000")
    with ended(start_daemon(model_path, short_directory / "full", *settings)) as process:
        with process.connect(timeout_seconds=60.0) as daemon:
            with pytest.raises(RefitdError) as early:
                daemon.refit(model)
            assert (early.value.code, early.value.retryable) == (ErrorCode.LOADING, True)
            with pytest.raises(RequestTimedOut, match=r"after 0.1 s the model is not loaded yet: .*load_model\(\)"):
                daemon.wait_until_ready(0.1)
            assert (exit_code(process.endpoint), exit_code(process.endpoint, "--ready")) == (0, 1)
            with pytest.raises(RefitdError, match="lower engine") as refused:
                daemon.load_model()
            assert refused.value.code is ErrorCode.ENGINE_ERROR
        assert process.process.wait(60) == STARTUP_EXIT
        assert process.engine_pids() == []
        assert not list((short_directory / "full").glob("load-progress.*"))
