"""Where the engine's processes put their temporary files: a directory of the daemon's own, removed at its end.

vLLM makes a rendezvous file and sockets with every engine, and removes neither when it is killed or stopped at once.
The directory of a daemon that was killed is removed by the next one that has the same runtime directory.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import msgspec
import psutil
import structlog

from refit_protocol.endpoint import MAX_SOCKET_PATH_BYTES
from refitd.parent_death import ProcessIdentity

RECORD_NAME = "temporary-directory.json"
PREFIX = "refitd-engine-"
# Of a socket's name in the directory, with the slash: vLLM takes a UUID.
SOCKET_NAME_BYTES = 37
SHORT_PLACE = "/tmp"

_log = structlog.get_logger(__name__)


class TemporaryRecord(msgspec.Struct, frozen=True):
    directory: str
    daemon: str


def prepare(environment: MutableMapping[str, str], runtime_directory: Path) -> None:
    """In the daemon, before it makes the engine: this process and its children use a new directory from now on.

    Raises OSError where none can be made.
    """
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", _compiled_code())
    # torch looks for these headers in the temp directory, whatever the variable above says: every start on CPUs would
    # compile them anew, also for kernels that are compiled already.
    environment.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    directory = _make_directory()
    content = TemporaryRecord(str(directory), str(ProcessIdentity.of(os.getpid())))
    (runtime_directory / RECORD_NAME).write_bytes(msgspec.json.encode(content))
    environment["TMPDIR"] = str(directory)
    environment.setdefault("VLLM_RPC_BASE_PATH", str(directory))
    tempfile.tempdir = str(directory)


def clear(runtime_directory: Path) -> None:
    """Removes the recorded directory, once its daemon is this process or dead."""
    path = runtime_directory / RECORD_NAME
    content = _read(path)
    if content is None:
        return
    daemon = ProcessIdentity.parse(content.daemon)
    if daemon.pid != os.getpid() and daemon.is_alive():
        return
    directory = Path(content.directory)
    if _is_ours(directory):
        shutil.rmtree(directory, ignore_errors=True)
    path.unlink()


def _make_directory() -> Path:
    """In the usual place, or in /tmp where no socket's path could be as long as that."""
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    if len(os.fsencode(directory)) + SOCKET_NAME_BYTES <= MAX_SOCKET_PATH_BYTES:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHORT_PLACE))


def _compiled_code() -> str:
    """What torch has compiled is not temporary: it stays where torch itself would keep it."""
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{psutil.Process().username()}")


def _is_ours(directory: Path) -> bool:
    """A record that was tampered with, or is of another boot, must not name just any directory."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return directory.name.startswith(PREFIX) and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _read(path: Path) -> TemporaryRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=TemporaryRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        _log.warning("the record of temporary files cannot be read", path=str(path), reason=str(error))
        return None
