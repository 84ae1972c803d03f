"""Finding each other through a store: who is missing, who is there twice, and who was told something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.rendezvous import GroupTerms, Rendezvous
from tests.waiting import until


class DictStore:
    """What TCPStore does, in one process; `gone` is a host that has died."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._answer()
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._answer()
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self._answer()
        with self._lock:
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        self._answer()
        return self.values.pop(key, None) is not None

    def _answer(self) -> None:
        if self.gone:
            raise RuntimeError("Connection reset by peer\nframe #0: ...")


@pytest.fixture
def store() -> DictStore:
    return DictStore()


def opened(store: DictStore, world_size: int) -> Rendezvous:
    host = Rendezvous(store, 0)
    host.open(GroupTerms(world_size=world_size, backend="gloo", bucket_bytes=128))
    return host


def soon() -> float:
    return time.monotonic() + 20.0


def outcomes(*calls: Callable[[], object]) -> list[object]:
    """What each call, all at the same time, returned or raised."""

    def outcome(call: Callable[[], object]) -> object:
        try:
            return call()
        except ProtocolError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        found = list(pool.map(outcome, calls))
    assert {error.code for error in found if isinstance(error, ProtocolError)} <= {ErrorCode.COLLECTIVE_FAILED}
    return found


def test_all_ranks_learn_the_hosts_terms(store: DictStore) -> None:
    host = opened(store, 3)
    terms = outcomes(
        lambda: host.join(3, soon()), *(lambda rank=rank: Rendezvous(store, rank).join(3, soon()) for rank in (1, 2))
    )
    assert terms == [GroupTerms(world_size=3, backend="gloo", bucket_bytes=128)] * 3


def test_a_missing_rank_is_named_when_time_is_over(store: DictStore) -> None:
    host = opened(store, 4)

    def give_up_early() -> object:
        until(lambda: "refit/joined/2" in store.values, "rank 2")
        return host.join(4, time.monotonic() + 0.2)

    first, second = outcomes(give_up_early, lambda: Rendezvous(store, 2).join(4, soon()))
    for error in (first, second):
        assert isinstance(error, ProtocolError)
        assert "[1, 3]" in error.message
    assert isinstance(first, ProtocolError)
    assert first.details["missing"] == [1, 3]


def test_a_rank_that_joins_twice_ends_it_for_all_at_once(store: DictStore) -> None:
    host = opened(store, 3)
    ended = outcomes(lambda: host.join(3, soon()), *(lambda: Rendezvous(store, 1).join(3, soon()) for _ in range(2)))
    assert all(isinstance(error, ProtocolError) and "two members have rank 1" in error.message for error in ended)


@pytest.mark.parametrize(("rank", "world_size", "reason"), [(1, 2, "has 3"), (3, 3, "not in a group of 3")])
def test_a_member_that_was_told_something_else_ends_it_for_all_at_once(
    store: DictStore, rank: int, world_size: int, reason: str
) -> None:
    host = opened(store, 3)
    ended = outcomes(lambda: host.join(3, soon()), lambda: Rendezvous(store, rank).join(world_size, soon()))
    assert all(isinstance(error, ProtocolError) and reason in error.message for error in ended)


def test_a_store_of_somebody_else_is_recognised(store: DictStore) -> None:
    """A plain torch.distributed group keeps other keys there."""
    store.set("default_pg/0//cpu//0", "x")
    (error,) = outcomes(lambda: Rendezvous(store, 1).join(2, soon()))
    assert isinstance(error, ProtocolError)
    assert "plain torch.distributed" in error.message


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        (b"{}", "cannot be read"),
        (b"\x80\x04", "cannot be read"),
        (b'{"version":9,"world_size":2,"backend":"gloo","bucket_bytes":64}', "version 9"),
        (b'{"world_size":2,"backend":"gloo","bucket_bytes":100}', "not a multiple"),
        (b'{"world_size":2,"backend":"mpi","bucket_bytes":64}', "cannot be read"),
    ],
)
def test_terms_that_cannot_be_are_refused(store: DictStore, terms: bytes, reason: str) -> None:
    store.values["refit/terms"] = terms
    (error,) = outcomes(lambda: Rendezvous(store, 1).join(2, soon()))
    assert isinstance(error, ProtocolError)
    assert reason in error.message


def test_whoever_waits_can_be_told_to_stop(store: DictStore) -> None:
    stopped = threading.Event()
    stopped.set()
    opened(store, 2)
    (error,) = outcomes(lambda: Rendezvous(store, 1, stopped).join(2, soon()))
    assert isinstance(error, ProtocolError)
    assert "given up" in error.message


def test_a_dead_host_is_said_to_be_dead(store: DictStore) -> None:
    """In one line, without PyTorch's stack."""
    opened(store, 2)
    store.gone = True
    (error,) = outcomes(lambda: Rendezvous(store, 1).raise_if_failed())
    assert isinstance(error, ProtocolError)
    assert error.message.endswith("Connection reset by peer")


def test_the_sender_waits_for_all_receivers_of_each_refit(store: DictStore) -> None:
    """Readiness counts once; nothing is left in the store."""
    sender, first, second = (Rendezvous(store, rank) for rank in range(3))
    for layout in ("a", "b"):
        sender.begin_refit()
        first.say_ready(layout)
        assert not sender.all_ready([1, 2], layout)
        second.say_ready(layout)
        assert sender.all_ready([1, 2], layout)
        assert not store.values


def test_a_receiver_of_other_tensors_stops_the_sender_and_all(store: DictStore) -> None:
    sender, receiver = Rendezvous(store, 0), Rendezvous(store, 1)
    sender.begin_refit()
    receiver.say_ready("these")
    ended = outcomes(lambda: sender.all_ready([1], "those"))
    ended += outcomes(receiver.raise_if_failed)
    assert all(isinstance(error, ProtocolError) and "differ" in error.message for error in ended)
