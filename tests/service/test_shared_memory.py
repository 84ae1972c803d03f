"""What an engine leaves in /dev/shm is removed if, and only if, it is certainly ours."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from refitd import shared_memory

SHM = Path("/dev/shm")
HOLDER = """
import mmap, sys
held = open(sys.argv[1], "r+b")
mapped = mmap.mmap(held.fileno(), 4096)
print("mapped", flush=True)
sys.stdin.read()
"""
# A daemon whose engine has mapped the object: it records, says so, and is then killed.
DAEMON = """
import mmap, sys
from pathlib import Path
from refitd import shared_memory
held = open(sys.argv[1], "r+b")
mapped = mmap.mmap(held.fileno(), 4096)
shared_memory.record(Path(sys.argv[2]))
print("recorded", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def made() -> Iterator[Path]:
    """An object as Python's shared memory makes them."""
    path = SHM / f"psm_refitd_test_{os.getpid()}"
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has said its one line."""
    command = [sys.executable, "-c", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def killed_daemon(made: Path, directory: Path) -> None:
    with running(DAEMON, str(made), str(directory)):
        assert shared_memory.clear(directory) == [], "its daemon lives"


def test_what_a_killed_engine_left_is_removed(made: Path, tmp_path: Path) -> None:
    """Once; what was never recorded stays, whatever it is called."""
    other = made.with_name(f"{made.name}_other")
    other.write_bytes(b"")
    try:
        killed_daemon(made, tmp_path)
        assert shared_memory.clear(tmp_path) == [made.name]
        assert not made.exists()
        assert other.exists()
        assert list(tmp_path.iterdir()) == []
    finally:
        other.unlink()


def test_what_another_process_maps_stays(made: Path, tmp_path: Path) -> None:
    """Until that one has ended, too."""
    killed_daemon(made, tmp_path)
    with running(HOLDER, str(made)):
        assert shared_memory.clear(tmp_path) == []
        assert made.exists()
    assert shared_memory.clear(tmp_path) == [made.name]


def test_another_object_of_the_same_name_stays(made: Path, tmp_path: Path) -> None:
    """Names come again; the object that was ours is gone."""
    killed_daemon(made, tmp_path)
    again = made.with_name(f"{made.name}_again")
    again.write_bytes(bytes(4096))
    again.rename(made)
    assert shared_memory.clear(tmp_path) == []
    assert made.exists()


def test_a_record_of_an_earlier_boot_says_nothing(made: Path, tmp_path: Path) -> None:
    killed_daemon(made, tmp_path)
    path = tmp_path / shared_memory.RECORD_NAME
    path.write_text(path.read_text().replace('"boot":"', '"boot":"x'))
    assert shared_memory.clear(tmp_path) == []
    path.write_text("{")
    assert shared_memory.clear(tmp_path) == []
    assert made.exists()


def test_a_daemon_clears_its_own_at_its_end(made: Path, tmp_path: Path) -> None:
    """Its own mapping does not count: it is about to end."""
    with made.open("r+b") as held, mmap.mmap(held.fileno(), 4096):
        shared_memory.record(tmp_path)
        assert shared_memory.clear(tmp_path) == [made.name]
