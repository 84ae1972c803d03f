"""One engine of two tensor-parallel ranks for all tests here that need no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon_process import DaemonProcess
from tests.parallel.engines import Said, parallel_daemon, said


@pytest.fixture(scope="package")
def two_ranks(short_directory: Path) -> Iterator[DaemonProcess]:
    """`test_worker_death` kills it, after all others."""
    with parallel_daemon(short_directory / "tp", "qwen3", "engine.tensor_parallel_size=2") as process:
        yield process


@pytest.fixture(scope="package")
def fresh(two_ranks: DaemonProcess) -> Said:
    """What that engine says as it was started, on weights A."""
    with two_ranks.connect() as connected:
        assert connected.status().version == 0
        return said(connected)
