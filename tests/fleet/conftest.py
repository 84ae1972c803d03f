from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.server.small_daemon import SmallDaemon, small_daemon


@pytest.fixture
def small_daemons(tmp_path: Path) -> Iterator[list[SmallDaemon]]:
    """Three daemons whose engines step when they are told to."""
    with ExitStack() as stack:
        yield [stack.enter_context(small_daemon(directory_in(tmp_path, number))) for number in range(3)]


def directory_in(parent: Path, number: int) -> Path:
    directory = parent / str(number)
    directory.mkdir(mode=0o700)
    return directory
