"""From the trainer's side: whether this process and the running daemon can see each other at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from refit_protocol.endpoint import socket_path
from refitd.doctor.finding import Finding, failed, passed, warned

# What must be one and the same for memory to be shared, and what to do where it is not.
NAMESPACES = {
    "pid": "start both containers with --pid=host, or one with --pid=container:OTHER",
    "ipc": "start both containers with --ipc=host, or one with --ipc=container:OTHER",
}


def check_daemon_process(pid: int, endpoint: str, proc: Path = Path("/proc")) -> Iterator[Finding]:
    """`pid` is what the daemon says of itself; in another PID namespace it names nobody, or a stranger."""
    path = socket_path(endpoint)
    if not (proc / str(pid)).exists() or (path is not None and not _listens(proc, pid, path)):
        text = f"the daemon calls itself process {pid}, which here is nobody or another"
        yield failed("PID namespace", text, NAMESPACES["pid"])
        return
    yield check_user(pid, proc)
    for name, advice in NAMESPACES.items():
        yield check_namespace(name, pid, advice, proc)
    for place in ("tmp", "dev/shm"):
        yield from check_same_place(pid, place, proc)


def check_user(pid: int, proc: Path) -> Finding:
    daemon, mine = (proc / str(pid)).stat().st_uid, os.getuid()
    if mine in (0, daemon):
        return passed("user", f"daemon {daemon}, trainer {mine}")
    return failed("user", f"the daemon runs as {daemon}, this process as {mine}", "run both as one user")


def check_namespace(name: str, pid: int, advice: str, proc: Path) -> Finding:
    label = f"{name.upper()} namespace"
    try:
        theirs, mine = (os.readlink(proc / process / "ns" / name) for process in (str(pid), "self"))
    except PermissionError:
        return warned(label, "cannot be compared", "run this as the daemon's user")
    if theirs == mine:
        return passed(label, f"shared ({mine})")
    return failed(label, f"the daemon is in {theirs}, this process in {mine}", advice)


def check_same_place(pid: int, place: str, proc: Path) -> Iterator[Finding]:
    """A mount of its own on either side hides sockets or segments."""
    try:
        theirs = (proc / str(pid) / "root" / place).stat()
        mine = (Path("/") / place).stat()
    except (PermissionError, FileNotFoundError):
        return
    if (theirs.st_dev, theirs.st_ino) == (mine.st_dev, mine.st_ino):
        yield passed(f"/{place}", "the daemon's is the same")
    else:
        advice = "set PrivateTmp=no in the unit, or mount one into both containers"
        yield failed(f"/{place}", "the daemon has another one", advice)


def check_versions(daemon_version: str, own_version: str) -> Finding:
    found = f"daemon {daemon_version}, here {own_version}"
    if daemon_version == own_version:
        return passed("version", found)
    return warned("version", found, "protocol version 1 covers both; install one version to be sure")


def _listens(proc: Path, pid: int, path: Path) -> bool:
    """Whether that process holds the lock of the endpoint, which its daemon wrote its pid into."""
    command = _read(proc / str(pid) / "cmdline")
    return "refitd" in command or str(pid) == _read(path.with_name(path.name + ".lock")).strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
