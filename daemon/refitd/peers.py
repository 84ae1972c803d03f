"""Processes on the other end of the socket: whose they are, and a descriptor that tells of their death."""

from __future__ import annotations

import errno
import grp
import os
from dataclasses import dataclass
from pathlib import Path

from refit_protocol.errors import ErrorCode, ProtocolError

ROOT = 0


@dataclass(frozen=True)
class Owner:
    """Of a process: its effective user and all its groups."""

    user: int
    groups: frozenset[int]


def watch_process(pid: int, group: str | None) -> int:
    """A pidfd, readable once the process has ended. Raises `peer_not_allowed` unless it may talk to this daemon."""
    if pid <= 0:
        raise ProtocolError(ErrorCode.MALFORMED_MESSAGE, f"pid {pid} is not a process")
    try:
        pidfd = os.pidfd_open(pid)
    except OverflowError:
        raise ProtocolError(ErrorCode.MALFORMED_MESSAGE, f"pid {pid} is not a process") from None
    except OSError as error:
        raise _cannot_watch(pid, error) from None
    try:
        _check_owner(pid, group)
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


def _check_owner(pid: int, group: str | None) -> None:
    try:
        owner = _owner(Path(f"/proc/{pid}/status").read_text())
    except OSError as error:
        raise _cannot_watch(pid, error) from None
    if not may_connect(owner, os.getuid(), None if group is None else grp.getgrnam(group).gr_gid):
        raise ProtocolError(
            ErrorCode.PEER_NOT_ALLOWED, f"process {pid} belongs to user {owner.user}, the daemon to user {os.getuid()}"
        )


def may_connect(owner: Owner, daemon_user: int, group: int | None) -> bool:
    """The daemon's own user, root, and the members of the configured group."""
    return owner.user in (daemon_user, ROOT) or group in owner.groups


def _owner(status: str) -> Owner:
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    effective = {name: int(lines[name].split()[1]) for name in ("Uid", "Gid")}
    return Owner(effective["Uid"], frozenset([effective["Gid"], *map(int, lines["Groups"].split())]))


def _cannot_watch(pid: int, error: OSError) -> ProtocolError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ProtocolError(ErrorCode.SESSION_LIMIT, "the daemon has no file descriptor left for another session")
    return ProtocolError(
        ErrorCode.PEER_NOT_ALLOWED,
        f"process {pid} is not visible to the daemon ({error.strerror}): do both share a PID namespace? "
        "Clients elsewhere leave pid out",
    )
