"""What the engine's processes put into the temp directory goes with the daemon, or with the next start of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd import temporary
from refitd.temporary import MAX_SOCKET_PATH_BYTES, PREFIX, RECORD_NAME, SOCKET_NAME_BYTES
from tests.daemon_process import DaemonProcess

# A daemon that has its directory, and a child that leaves a file where libraries put theirs.
DAEMON = """
import os, subprocess, sys, tempfile
from pathlib import Path
from refitd import temporary
temporary.prepare(os.environ, Path(sys.argv[1]))
child = [sys.executable, "-c", "import tempfile; print(tempfile.mkstemp(prefix='vllm_dist_')[1])"]
print(subprocess.check_output(child, text=True).strip(), tempfile.gettempdir(), flush=True)
sys.stdin.read()
"""


class Daemon:
    """`left` is the file of its child, `directory` where its own temporary files go."""

    def __init__(self, runtime_directory: Path, place: Path) -> None:
        variables = {**os.environ, "TMPDIR": str(place)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", DAEMON, str(runtime_directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
        )
        assert self._process.stdout is not None
        left, directory = self._process.stdout.readline().split()
        self.left, self.directory = Path(left), Path(directory)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def runtime_directory(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def place(short_directory: Path) -> Path:
    """The machine's temp directory, as far as these daemons know."""
    path = short_directory / "tmp"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture
def killed(runtime_directory: Path, place: Path) -> Daemon:
    daemon = Daemon(runtime_directory, place)
    daemon.kill()
    return daemon


def test_the_directory_of_a_killed_daemon_goes_with_the_next_start(
    runtime_directory: Path, place: Path, killed: Daemon
) -> None:
    """All that its processes left lay in it, and nothing beside it."""
    assert killed.left.parent == killed.directory
    assert list(place.iterdir()) == [killed.directory]
    temporary.clear(runtime_directory)
    assert list(place.iterdir()) == []
    assert not (runtime_directory / RECORD_NAME).exists()


def test_nothing_is_compiled_that_goes_with_the_daemon(daemon_process: DaemonProcess) -> None:
    """An engine that serves has compiled what it needs where the next one finds it."""
    assert list(daemon_process.temporary_directory.iterdir())
    assert not list(daemon_process.temporary_directory.rglob("*.gch"))
    assert not list(daemon_process.temporary_directory.glob("torchinductor_*"))


@pytest.fixture
def living(runtime_directory: Path, place: Path) -> Iterator[Daemon]:
    daemon = Daemon(runtime_directory, place)
    yield daemon
    daemon.kill()
    temporary.clear(runtime_directory)


def test_the_directory_of_a_living_daemon_stays(runtime_directory: Path, living: Daemon) -> None:
    """Another one that was given the same runtime directory by mistake must not take it away."""
    temporary.clear(runtime_directory)
    assert living.left.exists()


def test_sockets_have_room_where_the_temp_directory_is_long(runtime_directory: Path, short_directory: Path) -> None:
    """A socket's path is limited: a scratch directory of a cluster's job is soon too long for vLLM's."""
    long = short_directory / ("x" * 90)
    long.mkdir()
    daemon = Daemon(runtime_directory, long)
    daemon.kill()
    try:
        assert len(str(daemon.directory)) + SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES
        assert list(long.iterdir()) == []
    finally:
        temporary.clear(runtime_directory)
    assert not daemon.directory.exists()


@pytest.mark.parametrize("name", ["precious", f"{PREFIX}link"])
def test_a_record_does_not_name_just_any_directory(
    runtime_directory: Path, tmp_path: Path, killed: Daemon, name: str
) -> None:
    """What is no directory of this kind stays, and so does what a link points to."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    (tmp_path / f"{PREFIX}link").symlink_to(precious)
    record = runtime_directory / RECORD_NAME
    record.write_text(json.dumps({**json.loads(record.read_text()), "directory": str(tmp_path / name)}))
    temporary.clear(runtime_directory)
    assert (precious / "file").read_text() == "precious"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2", b"\xff\xfe"])
def test_a_damaged_record_is_no_reason_to_fail(runtime_directory: Path, content: bytes) -> None:
    """A half-written file from a crash must not keep the daemon from starting."""
    (runtime_directory / RECORD_NAME).write_bytes(content)
    temporary.clear(runtime_directory)
