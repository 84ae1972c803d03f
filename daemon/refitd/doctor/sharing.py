"""Sharing memory, tried for real: allocate here, open in a second process, compare what it reads.

`python -m refitd.doctor.sharing KIND ...` is that second process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from refitd.doctor.finding import Finding, failed, passed, skipped

SECRET_BYTES = 16
SEGMENT_BYTES = 1 << 20
PROBE_SECONDS = 60.0


class SharingError(Exception):
    """The second process could not read what this one wrote; the text says why."""


def check_memfd_sharing() -> Finding:
    """CPU memory: a sealed memfd, opened through /proc/PID/fd."""
    return _verdict("shared memory", share_memfd, "a trainer's CPU memory", "run trainer and daemon as one user")


def check_cuda_sharing() -> Finding:
    """GPU memory: a CUDA IPC handle, taken and opened through CuPy."""
    if find_spec("cupy") is None:
        return skipped("CUDA IPC", "tried through CuPy, which is not installed here")
    advice = "see docs/operating.md, containers: both sides need one PID and one IPC namespace and the same device"
    return _verdict("CUDA IPC", share_cuda, "a CUDA allocation", advice)


def share_memfd() -> None:
    """Raises `SharingError`, or OSError where the memory cannot even be made."""
    secret = secrets.token_bytes(SECRET_BYTES)
    descriptor = os.memfd_create("refitd-doctor", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.truncate(descriptor, SEGMENT_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        os.pwrite(descriptor, secret, 0)
        _compare(secret, "memfd", str(os.getpid()), str(descriptor))
    finally:
        os.close(descriptor)


def share_cuda() -> None:
    """Raises `SharingError`, or whatever CuPy raises where there is no memory to be had."""
    import cupy

    secret = secrets.token_bytes(SECRET_BYTES)
    memory = cupy.cuda.Memory(SEGMENT_BYTES)
    cupy.cuda.runtime.memcpy(memory.ptr, _address_of(secret), SECRET_BYTES, cupy.cuda.runtime.memcpyHostToDevice)
    handle: bytes = cupy.cuda.runtime.ipcGetMemHandle(memory.ptr)
    _compare(secret, "cuda", handle.hex())


def _verdict(check: str, share: Callable[[], None], what: str, advice: str) -> Finding:
    try:
        share()
    # CuPy's errors share no base with Python's, and the operator needs the text of any of them.
    except Exception as error:  # noqa: BLE001
        return failed(check, f"a second process cannot read {what}: {_first_line(error)}", advice)
    return passed(check, f"a second process reads {what}")


def _compare(secret: bytes, *arguments: str) -> None:
    command = [sys.executable, "-m", "refitd.doctor.sharing", *arguments]
    probe = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    if probe.returncode:
        raise SharingError(probe.stderr.strip().rpartition("\n")[2] or f"it ended with {probe.returncode}")
    if probe.stdout.strip() != secret.hex():
        raise SharingError("it reads something else")


def _read_memfd(pid: str, descriptor: str) -> bytes:
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), SEGMENT_BYTES, prot=mmap.PROT_READ) as mapping:
        return mapping[:SECRET_BYTES]


def _read_cuda(handle: str) -> bytes:
    import cupy

    pointer = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(handle))
    content = bytearray(SECRET_BYTES)
    cupy.cuda.runtime.memcpy(_address_of(content), pointer, SECRET_BYTES, cupy.cuda.runtime.memcpyDeviceToHost)
    cupy.cuda.runtime.ipcCloseMemHandle(pointer)
    return bytes(content)


def _address_of(content: bytes | bytearray) -> int:
    import numpy

    return int(numpy.frombuffer(content, dtype=numpy.uint8).ctypes.data)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


READERS: dict[str, Callable[..., bytes]] = {"memfd": _read_memfd, "cuda": _read_cuda}

if __name__ == "__main__":
    sys.stdout.write(READERS[sys.argv[1]](*sys.argv[2:]).hex())
