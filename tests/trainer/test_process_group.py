"""The trainer's own process group: real gloo between threads, without an engine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from refit_protocol.errors import ErrorCode
from refit_trainer import BroadcastGroup, ClientClosed, DType, LayoutMismatch, NotShareable, RefitdError, TensorShape
from refit_trainer.collective import Broadcaster
from refit_trainer.connection import Connection, ConnectionOptions
from refit_trainer.process_group import Listener, local_address, terms_of
from refit_trainer.writer import WriterRole
from tests.ports import reserved_port

SPECS = [TensorShape(name="a", dtype=DType.FLOAT32, shape=(40, 3)), TensorShape(name="b", dtype=DType.INT8, shape=(5,))]
SECONDS = 20.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def pair(pool: ThreadPoolExecutor, bucket_bytes: int = 128) -> tuple[BroadcastGroup, BroadcastGroup]:
    """The host and another rank."""
    listener, cpu = Listener("127.0.0.1", 0), torch.device("cpu")
    host = pool.submit(BroadcastGroup.hosted, listener, terms_of(2, cpu, bucket_bytes), cpu, SECONDS, threading.Event())
    other = BroadcastGroup.join("127.0.0.1", listener.port, 1, 2, timeout_seconds=SECONDS)
    return host.result(), other


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(120.0).view(3, 40).t(), "b": torch.arange(5, dtype=torch.int8)}


def test_what_is_broadcast_arrives(pool: ThreadPoolExecutor) -> None:
    """Strided tensors, in pieces smaller than they are, twice; the last piece stays in the receiver's buffer."""
    host, other = pair(pool)
    with host, other:
        for _ in range(2):
            attending = pool.submit(other.attend, SPECS)
            host.broadcast(tensors())
            attending.result()
            # `a` has four broadcasts of its own, then comes `b`.
            assert other._buffers[0][:5].tolist() == [0, 1, 2, 3, 4]


def test_who_attends_may_write_specs_as_who_sends(pool: ThreadPoolExecutor) -> None:
    """Both mean the same layout; what is no spec is refused at once, and the group is as good as before."""
    as_written = [
        TensorShape(name="a", dtype=torch.float32, shape=[40, 3]),  # type: ignore[arg-type]
        TensorShape(name="b", dtype="int8", shape=torch.Size([5])),  # type: ignore[arg-type]
    ]
    host, other = pair(pool)
    with host, other:
        with pytest.raises(TypeError, match="no tuple"):
            other.attend([("a", (40, 3))])  # type: ignore[list-item]
        attending = pool.submit(other.attend, as_written)
        host.broadcast(iter(tensors().items()), as_written)
        attending.result()
        assert other._buffers[0][:5].tolist() == [0, 1, 2, 3, 4]


def test_an_iterator_needs_its_specs_in_order(pool: ThreadPoolExecutor) -> None:
    """Without them nothing is sent; with another order it breaks off, which both sides are told."""
    host, other = pair(pool)
    with host, other:
        with pytest.raises(LayoutMismatch, match="specs="):
            host.broadcast(iter(tensors().items()))
        attending = pool.submit(other.attend, SPECS)
        host.broadcast(iter(tensors().items()), SPECS)
        attending.result()
        attending = pool.submit(other.attend, SPECS)
        with pytest.raises(LayoutMismatch, match="b comes where a is expected"):
            host.broadcast(reversed(tensors().items()), SPECS)
        with pytest.raises(RefitdError):
            attending.result()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: named.pop("b"), "b"),
        (lambda named: named.update(b=torch.zeros(6, dtype=torch.int8)), "expected"),
        (lambda named: named.update(b=torch.zeros(5)), "expected"),
        (lambda named: named.update(c=torch.zeros(1)), "c is not expected"),
    ],
)
def test_other_tensors_than_announced_break_the_group(
    pool: ThreadPoolExecutor, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    """The sender says what is wrong, and the group is used no more."""
    host, other = pair(pool)
    with host, other:
        named = tensors()
        change(named)
        attending = pool.submit(other.attend, SPECS)
        with pytest.raises(LayoutMismatch, match=message):
            host.broadcast(iter(named.items()), SPECS)
        finish(attending)
        with pytest.raises(ClientClosed):
            host.broadcast(tensors())


@pytest.mark.parametrize("specs", [None, SPECS], ids=["mapping", "iterator"])
def test_unknown_name_among_those_selected_breaks_nothing(
    pool: ThreadPoolExecutor, specs: list[TensorShape] | None
) -> None:
    """It is refused before anything is asked of the daemon or sent to the group."""
    host, other = pair(pool)
    with host, other:
        connection = Connection(ConnectionOptions("ipc:///nowhere", "never opened"))
        broadcaster = Broadcaster(connection, WriterRole(connection, None), host, 1)
        weights = tensors() if specs is None else iter(tensors().items())
        with pytest.raises(LayoutMismatch) as refused:
            next(broadcaster.refit_steps(weights, specs, {"only": ["a", "no.such.tensor"]}))
        assert refused.value.code is ErrorCode.MANIFEST_MISMATCH
        attending = pool.submit(other.attend, SPECS)
        host.broadcast(tensors())
        attending.result()


def finish(attending: Future[None]) -> None:
    """An error or, where all bytes had come already, none; but not a wait without end."""
    assert attending.exception(SECONDS) is None or isinstance(attending.exception(), RefitdError)


def test_receivers_that_expect_other_tensors_are_found_out_before_anything_is_sent(pool: ThreadPoolExecutor) -> None:
    host, other = pair(pool)
    with host, other:
        attending = pool.submit(other.attend, SPECS[:1])
        with pytest.raises(RefitdError, match="differ") as failed:
            host.broadcast(tensors())
        assert failed.value.code is ErrorCode.COLLECTIVE_FAILED
        with pytest.raises(RefitdError):
            attending.result()


def test_a_peer_that_leaves_ends_the_wait(pool: ThreadPoolExecutor) -> None:
    """The sender waits for a receiver that is gone: an error at once, long before the timeout."""
    host, other = pair(pool, bucket_bytes=64)
    with host:
        other.close()
        with pytest.raises(RefitdError) as failed:
            host.broadcast({"a": torch.zeros(64 << 20, dtype=torch.uint8)})
        assert failed.value.code is ErrorCode.COLLECTIVE_FAILED


def test_a_plain_process_group_is_refused_with_advice() -> None:
    """It can have no engine workers in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(NotShareable, match="plain process group"):
            BroadcastGroup.host(dist.group.WORLD, 0, 2)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


def test_the_default_group_is_never_touched(pool: ThreadPoolExecutor) -> None:
    host, other = pair(pool)
    with host, other:
        assert not dist.is_initialized()


def test_a_port_in_use_and_an_address_of_others_are_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for address, port in (("127.0.0.1", taken.getsockname()[1]), ("192.0.2.1", 0), ("no such host", 0)):
            with pytest.raises(RefitdError, match="cannot listen") as failed:
                BroadcastGroup.host(address, port, 2)
            assert failed.value.code is ErrorCode.COLLECTIVE_FAILED


def test_nobody_at_the_port_is_said_so() -> None:
    with reserved_port() as port, pytest.raises(RefitdError, match="no group at") as failed:
        BroadcastGroup.join("127.0.0.1", port, 1, 2, timeout_seconds=1.0)
    assert failed.value.code is ErrorCode.COLLECTIVE_FAILED


def test_tensors_on_other_devices_cannot_be_broadcast() -> None:
    with pytest.raises(NotShareable, match="meta"):
        BroadcastGroup.host("127.0.0.1", 0, 2, device="meta")


def test_the_own_address_is_that_of_the_way_there() -> None:
    assert local_address("127.0.0.1", 9) == "127.0.0.1"
