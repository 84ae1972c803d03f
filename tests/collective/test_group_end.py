"""The end of a group whose broadcasts are still being received; both of its members are in this process."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from refit_protocol.errors import ProtocolError
from refit_trainer import BroadcastGroup as TrainerGroup
from refit_trainer.process_group import Listener, terms_of
from refitd.worker.collective import BroadcastGroup, GroupAddress, Joining

CPU = torch.device("cpu")
# Far longer than the test: what ends earlier has been ended.
GROUP_SECONDS = 120.0
END_SECONDS = 30.0
PIECE_BYTES = 1 << 20


@pytest.fixture
def members() -> Iterator[tuple[TrainerGroup, BroadcastGroup]]:
    listener = Listener("127.0.0.1", 0)
    where = GroupAddress("127.0.0.1", listener.port, 2, 1, GROUP_SECONDS, PIECE_BYTES)
    with ThreadPoolExecutor(1) as pool:
        terms = terms_of(2, CPU, PIECE_BYTES)
        hosting = pool.submit(TrainerGroup.hosted, listener, terms, CPU, GROUP_SECONDS, threading.Event())
        joining = Joining(where, CPU)
        with hosting.result() as trainer:
            while (worker := joining.group()) is None:
                threading.Event().wait(0.01)
            yield trainer, worker


def test_what_is_sent_after_the_end_does_not_arrive(members: tuple[TrainerGroup, BroadcastGroup]) -> None:
    """Two broadcasts are posted, as in the middle of a refit; their sender goes on after the group has ended."""
    trainer, worker = members
    targets = [torch.zeros(PIECE_BYTES, dtype=torch.uint8) for _ in range(2)]
    posted = [worker.post(target) for target in targets]
    assert worker.close(posted).wait(END_SECONDS)
    assert all(work.is_completed() for work in posted)
    with suppress(RuntimeError):
        trainer._post(torch.ones(PIECE_BYTES, dtype=torch.uint8)).wait()
    assert not any(target.any() for target in targets)


def test_a_group_at_rest_has_nothing_to_wait_for(members: tuple[TrainerGroup, BroadcastGroup]) -> None:
    _, worker = members
    assert worker.close().wait(0)


def test_waiting_for_a_broadcast_can_be_taken_up_again(members: tuple[TrainerGroup, BroadcastGroup]) -> None:
    """A worker looks up now and then while its trainer is silent: the refit may have been aborted."""
    trainer, worker = members
    target = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
    work = worker.post(target)
    now = time.monotonic()
    assert not worker.has_come(work, until=now, give_up_at=now + GROUP_SECONDS)
    trainer._post(torch.ones(PIECE_BYTES, dtype=torch.uint8)).wait()
    assert worker.has_come(work, until=math.inf, give_up_at=now + GROUP_SECONDS)
    assert target.all()
    late = worker.post(target)
    with pytest.raises(ProtocolError, match="in time"):
        worker.has_come(late, until=math.inf, give_up_at=now)
    worker.close([late])
