"""The machine and this process's place in it: limits, shared memory, /tmp, ptrace, allocator settings."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from refitd.doctor.finding import Finding, failed, passed, warned

SHM_FAILED_BYTES = 64 << 20
SHM_WARNED_BYTES = 1 << 30
WANTED_OPEN_FILES = 4096
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def check_host(environment: Mapping[str, str], *, cuda: bool) -> Iterator[Finding]:
    yield check_shared_memory(Path("/dev/shm"))
    yield check_private_tmp(Path("/proc/self/mountinfo").read_text())
    yield check_ptrace_scope(Path("/proc/sys/kernel/yama/ptrace_scope"))
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if cuda:
        yield check_expandable_segments(environment)
        yield from check_device_files(sorted(Path("/dev").glob("nvidia[0-9]*")))


def check_shared_memory(path: Path) -> Finding:
    try:
        total = shutil.disk_usage(path).total
    except OSError as error:
        return failed("/dev/shm", error.strerror or str(error), "mount a tmpfs there: vLLM's processes talk through it")
    found = f"{total / 2**30:.2f} GiB"
    if total < SHM_FAILED_BYTES:
        return failed("/dev/shm", found, "too small for vLLM's queues: --shm-size=8g or --ipc=host for a container")
    if total < SHM_WARNED_BYTES:
        return warned("/dev/shm", found, "small for tensor parallel engines: --shm-size=8g or --ipc=host")
    return passed("/dev/shm", found)


def check_private_tmp(mounts: str) -> Finding:
    """A /tmp that systemd made for one service holds neither the trainers' sockets nor ours for them."""
    roots = {fields[4]: fields[3] for line in mounts.splitlines() if len(fields := line.split()) > 4}
    if "systemd-private-" in roots.get("/tmp", ""):
        return warned("PrivateTmp", "this process has a /tmp of its own", "set PrivateTmp=no in both services")
    return passed("PrivateTmp", "/tmp is shared")


def check_ptrace_scope(path: Path) -> Finding:
    """Reading another process's memfd needs one user and no ptrace; the scope matters to other ways of sharing."""
    scope = path.read_text().strip() if path.exists() else "0"
    if scope == "0":
        return passed("ptrace scope", "0: one user's processes may inspect each other")
    return passed("ptrace scope", f"{scope}: fine for refitd, which needs no ptrace; expandable segments do")


def check_open_files(soft_limit: int) -> Finding:
    if soft_limit in (resource.RLIM_INFINITY, -1) or soft_limit >= WANTED_OPEN_FILES:
        return passed("open files", str(soft_limit))
    return warned("open files", str(soft_limit), f"raise it for many clients: ulimit -n {WANTED_OPEN_FILES}")


def check_expandable_segments(environment: Mapping[str, str]) -> Finding:
    settings = {name: value for name in ALLOCATOR_VARIABLES if (value := environment.get(name))}
    expandable = [name for name, value in settings.items() if "expandable_segments:true" in value.lower()]
    if not expandable:
        return passed("expandable segments", "off")
    advice = "a trainer with them refits from buckets only; a daemon with them cannot have engine.enable_sleep_mode"
    return warned("expandable segments", f"on by {', '.join(expandable)}", advice)


def check_device_files(files: list[Path]) -> Iterator[Finding]:
    for file in files:
        if not os.access(file, os.R_OK | os.W_OK):
            advice = f"usermod -aG {file.group()} {os.environ.get('USER', 'USER')}, or DeviceAllow in the unit"
            yield failed("permissions", f"{file} cannot be opened by user {os.getuid()}", advice)
