"""Taking the socket's path: private, exclusive, and never anybody else's file."""

from __future__ import annotations

import grp
import os
import socket
import stat
from pathlib import Path

import pytest

from refitd.config import ServerConfig
from refitd.endpoint import EndpointError, EndpointLock


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """In a directory that does not exist yet."""
    return tmp_path / "run" / "s"


def bind(path: Path) -> socket.socket:
    """A socket as libzmq would bind it, with whatever mode the umask leaves."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    return listener


def test_directory_lock_and_socket_are_private(path: Path) -> None:
    lock = EndpointLock(path, ServerConfig())
    with bind(path):
        lock.admit_group()
        assert mode(path.parent) == 0o700
        assert mode(path) == 0o600
        assert mode(path.with_name("s.lock")) == 0o600
        lock.release()
    assert not path.exists()


def test_group_may_come_in_and_nobody_else(path: Path) -> None:
    """The group gets through the directory and to the socket; it cannot list or change anything."""
    group = grp.getgrgid(os.getgid()).gr_name
    lock = EndpointLock(path, ServerConfig(socket_group=group))
    with bind(path):
        lock.admit_group()
        assert mode(path.parent) == 0o710
        assert mode(path) == 0o660
        assert path.stat().st_gid == os.getgid()
        lock.release()


def test_unknown_group_is_named(path: Path) -> None:
    lock = EndpointLock(path, ServerConfig(socket_group="no-such-group"))
    with bind(path), pytest.raises(EndpointError, match="no-such-group"):
        lock.admit_group()
    lock.release()


def test_second_daemon_is_refused_until_the_first_lets_go(path: Path) -> None:
    first = EndpointLock(path, ServerConfig())
    with pytest.raises(EndpointError, match=str(os.getpid())):
        EndpointLock(path, ServerConfig())
    first.release()
    EndpointLock(path, ServerConfig()).release()


def test_socket_of_a_killed_daemon_is_no_obstacle(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    bind(path).close()
    EndpointLock(path, ServerConfig()).release()


def test_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("mine")
    with pytest.raises(EndpointError, match="left alone"):
        EndpointLock(path, ServerConfig())
    assert path.read_text() == "mine"


def test_directory_open_to_others_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o755)
    with pytest.raises(EndpointError, match="chmod 700"):
        EndpointLock(path, ServerConfig())
