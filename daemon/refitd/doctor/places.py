"""Where the daemon will listen and keep its files, and what an earlier run may have left there."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from refit_protocol.endpoint import socket_path
from refitd.doctor.finding import Finding, failed, passed, skipped, warned
from refitd.doctor.software import NO_SERVICE


def check_runtime_directory(directory: Path) -> Finding:
    """It is made at the start; here it must be ours and private, or possible to make."""
    if not directory.exists():
        parent = next(place for place in directory.parents if place.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return passed("runtime directory", f"{directory} will be made")
        return failed("runtime directory", f"{directory}: {parent} cannot be written", "set REFITD_RUNTIME_DIRECTORY")
    found = directory.stat()
    if not stat.S_ISDIR(found.st_mode):
        return failed("runtime directory", f"{directory} is not a directory", "remove it, or choose another")
    if found.st_uid != os.getuid():
        owner = f"{directory} belongs to user {found.st_uid}, not {os.getuid()}"
        return failed("runtime directory", owner, "run as that user, or choose another directory")
    if found.st_mode & 0o077:
        return failed("runtime directory", f"{directory} is open to others", f"chmod 700 {directory}")
    return passed("runtime directory", f"{directory}, mode {stat.S_IMODE(found.st_mode):o}")


def check_socket(endpoint: str, *, answered: bool) -> Finding:
    """`answered`: whether a daemon has just replied there."""
    try:
        path = socket_path(endpoint)
    except ValueError as error:
        return failed("socket", str(error), "choose a shorter absolute path with --endpoint")
    if path is None:
        return passed("socket", f"{endpoint} needs no file")
    if answered:
        return passed("socket", f"a daemon answers at {endpoint}")
    return _check_silent_path(path)


def check_port(host: str, port: int) -> Finding:
    """Whether the HTTP port can be taken; with port 0 the system finds one."""
    place = f"{host} port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return failed("port", f"{place}: {error.strerror or error}", "choose another http.host or http.port")
    return passed("port", f"{place} is free")


def check_orphans(runtime_directory: Path, devices: Sequence[str]) -> Finding:
    try:
        from refitd import orphans
    except ModuleNotFoundError:
        return skipped("orphans", NO_SERVICE)
    found = orphans.find(runtime_directory, devices)
    if not found:
        return passed("orphans", "no engine of an earlier run")
    return failed("orphans", "; ".join(map(str, found)), "refitd serve --replace ends them")


def _check_silent_path(path: Path) -> Finding:
    if not path.exists():
        return passed("socket", f"{path} is free")
    if not stat.S_ISSOCK(path.stat().st_mode):
        return failed("socket", f"{path} is not a socket", "remove it, or choose another --endpoint")
    if _accepts(path):
        return warned("socket", f"something holds {path} but does not answer", "refitd status; is the daemon stuck?")
    return passed("socket", f"{path} was left behind and will be replaced")


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True
