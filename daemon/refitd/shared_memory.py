"""What an engine leaves in /dev/shm, which outlives every process: removed at its end, or at the next start.

vLLM's processes make their queues there, and those of an engine that is killed, or of any CPU engine with several
workers, stay behind: up to hundreds of megabytes each time. Only what is certainly ours is removed: an object that our
own engine had mapped in this boot, that still is the same object, and that no living process maps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import psutil
import structlog

from refitd.parent_death import ProcessIdentity

RECORD_NAME = "shared-memory.json"
# Python's shared memory and semaphores, and vLLM's; a driver's own files are the driver's to clear.
PREFIXES = ("psm_", "sem.mp-", "vllm")

_SHM = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_log = structlog.get_logger(__name__)


class SharedObject(msgspec.Struct, frozen=True):
    """A name alone may be used again; the inode says that it is the one."""

    name: str
    inode: int


class SharedRecord(msgspec.Struct, frozen=True):
    boot: str
    daemon: str
    objects: list[SharedObject]


def record(runtime_directory: Path) -> None:
    """In the daemon, once the engine runs: writes down what it and its processes have mapped."""
    daemon = psutil.Process()
    pids = [daemon.pid, *(child.pid for child in daemon.children(recursive=True))]
    objects = sorted({item for pid in pids for item in _mapped(pid)}, key=lambda item: item.name)
    content = SharedRecord(_boot_id(), str(ProcessIdentity.of(daemon.pid)), objects)
    temporary = runtime_directory / f"{RECORD_NAME}.new"
    temporary.write_bytes(msgspec.json.encode(content))
    temporary.replace(runtime_directory / RECORD_NAME)


def clear(runtime_directory: Path) -> list[str]:
    """Removes what the recorded engine left, once its daemon is this process or dead; returns the names."""
    path = runtime_directory / RECORD_NAME
    content = _read(path)
    if content is None or not _is_over(content):
        return []
    left = [item for item in content.objects if _is_same(item)]
    in_use = {item for pid in _others() for item in _mapped(pid)} if left else set()
    removed = [item.name for item in left if item not in in_use]
    for name in removed:
        (_SHM / name).unlink(missing_ok=True)
    if not in_use.intersection(left):
        path.unlink(missing_ok=True)
    if removed:
        _log.info("shared memory of an ended engine removed", names=removed)
    return removed


def _is_over(content: SharedRecord) -> bool:
    """What was recorded before the machine was booted says nothing about what is there now."""
    daemon = ProcessIdentity.parse(content.daemon)
    return content.boot == _boot_id() and (daemon.pid == os.getpid() or not daemon.is_alive())


def _is_same(item: SharedObject) -> bool:
    try:
        found = (_SHM / item.name).lstat()
    except FileNotFoundError:
        return False
    return found.st_ino == item.inode and found.st_uid == os.getuid()


def _mapped(pid: int) -> Iterator[SharedObject]:
    """Objects of these kinds that a process has mapped; none where it is gone or not ours to look into."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return
    for line in lines:
        _, _, place = line.partition(f" {_SHM}/")
        if place.startswith(PREFIXES) and not place.endswith(" (deleted)"):
            yield SharedObject(place, int(line.split()[4]))


def _others() -> Iterable[int]:
    return (pid for pid in psutil.pids() if pid != os.getpid())


def _read(path: Path) -> SharedRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SharedRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        _log.warning("the record of shared memory cannot be read", path=str(path), reason=str(error))
        return None


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
