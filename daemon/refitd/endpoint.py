"""Taking the endpoint: a private directory and an exclusive lock, before anything is bound.

A second libzmq bind on an ipc path steals it silently, and would replace an ordinary file there.
"""

from __future__ import annotations

import fcntl
import grp
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from refit_protocol.endpoint import socket_path

if TYPE_CHECKING:
    from refitd.config import Config, ServerConfig


class EndpointError(Exception):
    """The endpoint cannot be taken; one line for the operator."""


class TcpEndpoint:
    """The kernel keeps a second daemon from the port; who connects is decided by keys."""

    def admit_group(self) -> None:
        return None

    def release(self) -> None:
        return None


class EndpointLock:
    """Held from before the model loads until the daemon ends; the kernel frees it however that happens."""

    def __init__(self, path: Path, config: ServerConfig) -> None:
        """Raises `EndpointError`: the directory is not private, another daemon holds it, or a file is in the way."""
        self.path = path
        self._config = config
        _prepare_directory(path.parent, shared=config.socket_group is not None)
        self._lock = _lock(path)
        _refuse_foreign_file(path)

    def admit_group(self) -> None:
        """Sets mode and group of the bound socket."""
        os.chmod(self.path, self._config.socket_mode if self._config.socket_group is None else 0o660)
        if self._config.socket_group is not None:
            group = _group_id(self._config.socket_group)
            os.chown(self.path, -1, group)
            os.chown(self.path.parent, -1, group)
            os.chmod(self.path.parent, 0o710)

    def release(self) -> None:
        """Removes the socket and gives the lock up."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


Endpoint = EndpointLock | TcpEndpoint


def take_endpoint(config: Config) -> Endpoint:
    """Makes the runtime directory, where state files lie even if the endpoint does not. Raises `EndpointError`."""
    _prepare_directory(config.runtime_directory, shared=config.server.socket_group is not None)
    path = socket_path(config.endpoint)
    if path is not None:
        return EndpointLock(path, config.server)
    from refitd.curve import check_keys

    check_keys(config.server)
    return TcpEndpoint()


def _prepare_directory(directory: Path, *, shared: bool) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise EndpointError(f"runtime directory {directory}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise EndpointError(f"runtime directory {directory} is not a directory")
    if found.st_uid != os.getuid():
        raise EndpointError(f"runtime directory {directory} belongs to user {found.st_uid}: choose another endpoint")
    if found.st_mode & 0o077 and not shared:
        raise EndpointError(
            f"runtime directory {directory} is open to others (mode {stat.S_IMODE(found.st_mode):o}): chmod 700 it, "
            "or choose another endpoint"
        )


def _lock(path: Path) -> int:
    lock_path = path.with_name(path.name + ".lock")
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise EndpointError(
            f"endpoint ipc://{path} is in use by another daemon (pid {holder}): stop it, or choose another endpoint"
        ) from None
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _refuse_foreign_file(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise EndpointError(f"endpoint ipc://{path}: a file that is no socket lies there; it is left alone")


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise EndpointError(f"server.socket_group: there is no group {name!r}") from None
