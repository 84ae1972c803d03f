from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.server.raw_client import RawClient, raw_client
from tests.server.small_daemon import SmallDaemon, small_daemon

Connect = Callable[..., RawClient]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    with small_daemon(tmp_path) as running:
        yield running


@pytest.fixture
def connect(daemon: SmallDaemon) -> Iterator[Connect]:
    """Opens clients of `daemon` (or of another `endpoint`) that are closed at the test's end."""
    with ExitStack() as clients:

        def open_client(endpoint: str = daemon.endpoint, **options: Any) -> RawClient:
            return clients.enter_context(raw_client(endpoint, **options))

        yield open_client
