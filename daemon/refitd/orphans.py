"""Engine processes that an earlier daemon left behind: found, named, and ended if the operator says so.

There should be none (see `parent_death`), but what holds a GPU's memory must never be guessed about. Two traces lead to
them: a mark in the environment of every child, and a file in the runtime directory, since a process that renames itself
may overwrite its environment. Only processes of ours whose daemon is dead count; a pid alone never does.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import structlog

from refitd.parent_death import PARENT_VARIABLE, ProcessIdentity, open_pidfd

RUNTIME_VARIABLE = "REFIT_RUNTIME_DIRECTORY"
DEVICES_VARIABLE = "REFIT_DEVICES"
RECORD_NAME = "engine.json"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_log = structlog.get_logger(__name__)


class EngineRecord(msgspec.Struct, frozen=True):
    """What the file says: which daemon made which processes, in which boot of the machine, on which devices."""

    boot: str
    daemon: str
    processes: list[str]
    devices: list[str]


@dataclass(frozen=True)
class Orphan:
    process: ProcessIdentity
    name: str
    devices: tuple[str, ...]

    def __str__(self) -> str:
        place = ", ".join(self.devices) or "the CPU"
        return f"process {self.process.pid} ({self.name}) on {place}"


def mark(environment: MutableMapping[str, str], runtime_directory: Path, devices: Sequence[str]) -> None:
    """In the daemon, before it makes the engine, beside `parent_death.export`; `devices` are the UUIDs of its GPUs."""
    environment[RUNTIME_VARIABLE] = str(runtime_directory)
    environment[DEVICES_VARIABLE] = ",".join(devices)
    # vLLM renames its processes; this keeps setproctitle from using the environment's memory for the name.
    environment["SPT_NOENV"] = "1"


def record(runtime_directory: Path, devices: Sequence[str]) -> None:
    """In the daemon, once the engine runs: writes down its present children."""
    children = psutil.Process().children(recursive=True)
    content = EngineRecord(
        boot=_BOOT_ID.read_text().strip(),
        daemon=str(ProcessIdentity.of(os.getpid())),
        processes=[str(identity) for identity in _living(child.pid for child in children)],
        devices=list(devices),
    )
    temporary = runtime_directory / f"{RECORD_NAME}.new"
    temporary.write_bytes(msgspec.json.encode(content))
    temporary.replace(runtime_directory / RECORD_NAME)


def forget(runtime_directory: Path) -> None:
    """In the daemon, once the engine has ended."""
    (runtime_directory / RECORD_NAME).unlink(missing_ok=True)


def find(runtime_directory: Path, devices: Sequence[str] = ()) -> list[Orphan]:
    """Living processes of a dead daemon that used this runtime directory or one of these devices."""
    found = {orphan.process: orphan for orphan in _recorded(runtime_directory)}
    found.update((orphan.process, orphan) for orphan in _marked(runtime_directory, frozenset(devices)))
    return sorted(found.values(), key=lambda orphan: orphan.process.pid)


def end(orphans: Iterable[Orphan], timeout_seconds: float = 10.0) -> list[Orphan]:
    """Kills them, who serve nobody, without a SIGTERM first; returns those that have not ended in time."""
    watched = [(orphan, pidfd) for orphan in orphans if (pidfd := open_pidfd(orphan.process)) is not None]
    for orphan, pidfd in watched:
        _log.warning("ending an engine process of an earlier run", process=orphan.process.pid, name=orphan.name)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    deadline = time.monotonic() + timeout_seconds
    return [orphan for orphan, pidfd in watched if not _ends(pidfd, deadline - time.monotonic())]


def _ends(pidfd: int, timeout_seconds: float) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    ended = bool(poller.poll(max(0.0, timeout_seconds) * 1000))
    os.close(pidfd)
    return ended


def _recorded(runtime_directory: Path) -> Iterator[Orphan]:
    content = _read_record(runtime_directory / RECORD_NAME)
    if content is None or content.boot != _BOOT_ID.read_text().strip():
        return
    if ProcessIdentity.parse(content.daemon).is_alive():
        return
    for process in map(ProcessIdentity.parse, content.processes):
        if process.is_alive():
            yield Orphan(process, _name(process.pid), tuple(content.devices))


def _read_record(path: Path) -> EngineRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        _log.warning("the record of the last engine cannot be read", path=str(path), reason=str(error))
        return None


def _marked(runtime_directory: Path, devices: frozenset[str]) -> Iterator[Orphan]:
    for process in _living(psutil.pids()):
        environment = _environment(process.pid)
        if PARENT_VARIABLE not in environment or process.pid == os.getpid():
            continue
        of_process = tuple(device for device in environment.get(DEVICES_VARIABLE, "").split(",") if device)
        same_place = environment.get(RUNTIME_VARIABLE) == str(runtime_directory)
        if (same_place or devices & set(of_process)) and not _daemon_lives(environment[PARENT_VARIABLE]):
            yield Orphan(process, _name(process.pid), of_process)


def _daemon_lives(parent: str) -> bool:
    try:
        return ProcessIdentity.parse(parent).is_alive()
    except ValueError:  # somebody else's variable: not ours to end
        return True


def _living(pids: Iterable[int]) -> Iterator[ProcessIdentity]:
    for pid in pids:
        try:
            yield ProcessIdentity.of(pid)
        except ProcessLookupError:
            continue


def _environment(pid: int) -> dict[str, str]:
    """What the process was started with; empty where it is not ours to read, or is gone."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return {}
    pairs = (entry.partition(b"=") for entry in content.split(b"\0"))
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
