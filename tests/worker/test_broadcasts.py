"""Broadcasts into a worker: what comes after the end of their refit changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from refit_trainer import BroadcastGroup, RefitdError
from refit_trainer.layouts import layout_of
from refit_trainer.process_group import Listener, terms_of
from tests.worker.engines import LoadedWorker, differences
from tests.worker.models import Kind

Weights = dict[str, torch.Tensor]

SOURCE = 5
CPU = torch.device("cpu")
PIECE_BYTES = 16 << 10
# Far longer than the test: what ends earlier has been ended.
GROUP_SECONDS = 120.0
IN_THE_MIDDLE = 12


@pytest.fixture
def worker(worker_of: Callable[[Kind], LoadedWorker]) -> Iterator[LoadedWorker]:
    """The untied Qwen3, its weights kept."""
    loaded = worker_of("qwen3")
    loaded.call("refitd_keep_last", "host")
    yield loaded
    loaded.call("refitd_close_all")
    loaded.call("refitd_keep_last", "none")


@pytest.fixture
def trainer(worker: LoadedWorker) -> Iterator[BroadcastGroup]:
    """The host of a group that the worker is in, as SOURCE."""
    listener = Listener("127.0.0.1", 0)
    where = {
        "address": "127.0.0.1",
        "port": listener.port,
        "world_size": 2,
        "timeout_seconds": GROUP_SECONDS,
        "max_bucket_bytes": PIECE_BYTES,
    }
    with ThreadPoolExecutor(1) as pool:
        terms = terms_of(2, CPU, PIECE_BYTES)
        hosting = pool.submit(BroadcastGroup.hosted, listener, terms, CPU, GROUP_SECONDS, threading.Event())
        worker.call("refitd_join", SOURCE, where, 1)
        while not worker.call("refitd_joined", SOURCE)["joined"]:
            threading.Event().wait(0.01)
        with hosting.result() as group:
            yield group


def test_what_is_sent_after_a_restore_does_not_arrive(
    worker: LoadedWorker, trainer: BroadcastGroup, weights_of: Callable[[Kind, int], Weights]
) -> None:
    """The trainer stalls in the middle, the refit is given up, the kept weights are put back: then it goes on."""
    kept, weights = worker.served(), weights_of("qwen3", 1)
    specs = list(layout_of(weights.items()).values())
    stalled, goes_on = threading.Event(), threading.Event()

    def stalling() -> Iterator[tuple[str, torch.Tensor]]:
        for index, named in enumerate(weights.items()):
            if index == IN_THE_MIDDLE:
                stalled.set()
                goes_on.wait()
            yield named

    worker.call("refitd_begin", SOURCE, [msgspec.to_builtins(spec) for spec in specs])
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(trainer.broadcast, stalling(), specs)
        try:
            while not stalled.is_set():
                assert not worker.call("refitd_receive", GROUP_SECONDS)["complete"]
            worker.call("refitd_receive", GROUP_SECONDS)
            assert differences(worker.served(), kept) != []
            assert worker.call("refitd_abort")["wrote"]
            worker.call("refitd_close_source", SOURCE)
            worker.call("refitd_restore")
        finally:
            goes_on.set()
        with pytest.raises(RefitdError):
            sending.result()
    assert differences(worker.served(), kept) == []
