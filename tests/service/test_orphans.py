"""Orphans are real processes here: made as an earlier daemon would have, found, told from innocent ones, and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from refitd import orphans
from refitd.parent_death import PARENT_VARIABLE, ProcessIdentity

GPU = "GPU-6a4e5b1e-0000-0000-0000-000000000001"
OTHER_GPU = "GPU-6a4e5b1e-0000-0000-0000-000000000002"

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that waits for ever with the given variables, and ends it after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "infinity"], env={**os.environ, **environment}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def dead_daemon() -> str:
    process = subprocess.Popen(["sleep", "infinity"])
    identity = str(ProcessIdentity.of(process.pid))
    process.kill()
    process.wait()
    return identity


def marks(runtime_directory: Path, daemon: str, *devices: str) -> dict[str, str]:
    environment = {PARENT_VARIABLE: daemon}
    orphans.mark(environment, runtime_directory, devices)
    return environment


def pids(found: list[orphans.Orphan]) -> list[int]:
    return [orphan.process.pid for orphan in found]


def test_a_marked_child_of_a_dead_daemon_is_an_orphan(tmp_path: Path, start: Start, dead_daemon: str) -> None:
    """It is named by pid, name and device, which is what the operator is told."""
    process = start(**marks(tmp_path, dead_daemon, GPU))
    [orphan] = orphans.find(tmp_path)
    assert str(orphan) == f"process {process.pid} (sleep) on {GPU}"


def test_children_of_a_living_daemon_are_not(tmp_path: Path, start: Start) -> None:
    """The engine of a daemon that runs is nobody's orphan, whoever asks."""
    start(**marks(tmp_path, str(ProcessIdentity.of(os.getpid())), GPU))
    assert orphans.find(tmp_path, [GPU]) == []


def test_another_instances_orphan_counts_where_it_holds_our_device(
    tmp_path: Path, start: Start, dead_daemon: str
) -> None:
    """Another runtime directory's orphan stands in the way only on the same GPU."""
    process = start(**marks(tmp_path / "other", dead_daemon, GPU))
    assert pids(orphans.find(tmp_path, [GPU])) == [process.pid]
    assert orphans.find(tmp_path, [OTHER_GPU]) == []
    assert orphans.find(tmp_path) == []


def test_processes_without_our_mark_are_left_alone(tmp_path: Path, start: Start) -> None:
    """Nothing of somebody else's is ever found, even with a variable of the same name."""
    start()
    start(**{PARENT_VARIABLE: "somebody else's value", orphans.RUNTIME_VARIABLE: str(tmp_path)})
    assert orphans.find(tmp_path, [GPU]) == []


def test_ending_kills_exactly_the_orphans(tmp_path: Path, start: Start, dead_daemon: str) -> None:
    """An orphan that is stopped ends too; a stranger lives on."""
    process, stranger = start(**marks(tmp_path, dead_daemon)), start()
    psutil.Process(process.pid).suspend()
    assert orphans.end(orphans.find(tmp_path)) == []
    assert process.wait(30) == -9
    assert stranger.poll() is None
    assert orphans.find(tmp_path) == []


def test_ending_does_not_hit_a_reused_pid(tmp_path: Path, start: Start) -> None:
    """Between finding and ending, the pid may have become somebody else's: its start time tells."""
    stranger = start()
    identity = ProcessIdentity.of(stranger.pid)
    earlier = ProcessIdentity(identity.pid, identity.start_ticks - 1)
    assert orphans.end([orphans.Orphan(earlier, "VLLM::EngineCore", (GPU,))]) == []
    assert stranger.poll() is None


RECORDING_DAEMON = """
import subprocess, sys, time
from pathlib import Path
from refitd import orphans
engine = subprocess.Popen(["sleep", "infinity"])
orphans.record(Path(sys.argv[1]), ["{gpu}"])
print(engine.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A daemon that wrote its record and left no mark in its child, and the child's pid."""
    command = [sys.executable, "-c", RECORDING_DAEMON.format(gpu=GPU), str(tmp_path)]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    engine = int(daemon.stdout.readline())
    yield daemon, engine
    if psutil.pid_exists(engine):
        psutil.Process(engine).kill()
    daemon.kill()
    daemon.communicate()


def test_the_record_finds_what_lost_its_mark(tmp_path: Path, recorded: tuple[subprocess.Popen[str], int]) -> None:
    """A process that overwrote its environment is found through the file, once its daemon is dead."""
    daemon, engine = recorded
    assert orphans.find(tmp_path) == []
    daemon.kill()
    daemon.wait()
    [orphan] = orphans.find(tmp_path)
    assert (orphan.process.pid, orphan.devices) == (engine, (GPU,))
    assert orphans.end([orphan]) == []
    assert orphans.find(tmp_path) == []


def test_a_record_of_an_earlier_boot_means_nothing(tmp_path: Path, recorded: tuple[subprocess.Popen[str], int]) -> None:
    """Start times count from the boot: those of another boot may fit a stranger."""
    daemon, _ = recorded
    daemon.kill()
    daemon.wait()
    path = tmp_path / orphans.RECORD_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))
    assert orphans.find(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2", b"\xff\xfe"])
def test_a_damaged_record_is_no_reason_to_fail(tmp_path: Path, content: bytes) -> None:
    """A half-written file from a crash must not keep the daemon from starting."""
    (tmp_path / orphans.RECORD_NAME).write_bytes(content)
    assert orphans.find(tmp_path) == []


def test_forgetting_removes_the_record(tmp_path: Path) -> None:
    """After an ordered end there is nothing to find, and forgetting twice does no harm."""
    orphans.record(tmp_path, [GPU])
    orphans.forget(tmp_path)
    orphans.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []
