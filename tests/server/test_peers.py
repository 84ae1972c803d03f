"""Which processes may talk to a daemon."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.peers import Owner, may_connect, watch_process


@pytest.mark.parametrize(
    ("owner", "group", "allowed"),
    [
        (Owner(1000, frozenset({1000})), None, True),
        (Owner(0, frozenset({0})), None, True),
        (Owner(1001, frozenset({1001})), None, False),
        (Owner(1001, frozenset({1001, 50})), 50, True),
        (Owner(1001, frozenset({1001})), 50, False),
    ],
)
def test_the_daemons_user_root_and_the_group(owner: Owner, group: int | None, allowed: bool) -> None:
    assert may_connect(owner, 1000, group) is allowed


def test_death_makes_the_descriptor_readable() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    pidfd = watch_process(process.pid, None)
    try:
        assert not select.select([pidfd], [], [], 0)[0]
        process.kill()
        assert select.select([pidfd], [], [], 30)[0]
    finally:
        process.kill()
        process.communicate()
        os.close(pidfd)


def test_process_that_is_not_there_is_refused() -> None:
    with pytest.raises(ProtocolError) as refusal:
        watch_process((1 << 22) - 1, None)
    assert refusal.value.code is ErrorCode.PEER_NOT_ALLOWED
