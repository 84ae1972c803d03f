"""The trainer's end of a collective refit: hosts the group that engine workers join, and broadcasts into it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroup

from refit_protocol.broadcast import BroadcastLayout
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.rendezvous import (
    GREETING,
    SOURCE_RANK,
    GroupBackend,
    GroupTerms,
    Rendezvous,
    collective_failed,
    first_line,
)
from refit_protocol.tensors import TensorShape
from refit_trainer.errors import ClientClosed, LayoutMismatch, NotShareable, RefitdError
from refit_trainer.layouts import NamedTensor, announced, layout_of, named_pairs
from refit_trainer.packing import PackedBroadcast, pack_broadcasts
from refit_trainer.staging import Weights

# Large enough to hide what a piece costs, small enough for an engine to have room for two.
BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
TIMEOUT_SECONDS = 60.0

_BUFFERS = 2
_CLOSE_SECONDS = 2.0
# A piece over NVLink takes less than a change of threads: so long this one stays awake. Over gloo it takes long, and
# whoever looks often takes from the cores that carry it.
_AWAKE_SECONDS: dict[GroupBackend, float] = {"gloo": 0.0, "nccl": 0.002}
_LOOK_SECONDS = 0.001
_TURN_SECONDS: dict[GroupBackend, float] = {"gloo": 0.008, "nccl": 0.002}
# NCCL's own watchdog would end the trainer's process; every wait here is bounded without it.
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
_NEVER = timedelta(days=1)

_BACKENDS: dict[str, GroupBackend] = {"cpu": "gloo", "cuda": "nccl"}


class Listener:
    """A port on `address`, held from before anybody is told of it; port 0 takes a free one."""

    def __init__(self, address: str, port: int) -> None:
        if isinstance(address, ProcessGroup):
            raise NotShareable(
                "a plain process group cannot be used: engine workers are no members of it; leave the group out, "
                "Daemon.collective() makes one of this process and the engine's workers"
            )
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((address, port), family=family)
        except OSError as error:
            reason = f"cannot listen on {address} port {port}: {error}"
            raise RefitdError(reason, code=ErrorCode.COLLECTIVE_FAILED) from None
        self.address = address
        self.port = int(self._socket.getsockname()[1])

    def store(self, timeout_seconds: float) -> TCPStore:
        """To be called once: the port belongs to the store then, and goes with it."""
        return TCPStore(
            self.address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            master_listen_fd=self._socket.detach(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """What the store has not taken over is closed: nobody must wait for an answer from it."""
        self._socket.close()


class BroadcastGroup:
    """A process group of trainer and engine workers, apart from torch.distributed's default group.

    Rank 0 hosts it and broadcasts. Whatever goes wrong in a broadcast breaks the group: close it and make another.
    """

    def __init__(self, group: Any, store: Store, rendezvous: Rendezvous, terms: GroupTerms, timeout_seconds: float):
        self._group = group
        self._store = store
        self._rendezvous = rendezvous
        self._timeout_seconds = timeout_seconds
        self._buffers: list[torch.Tensor] = []
        self._end: threading.Thread | None = None
        self._layout = BroadcastLayout((), terms.bucket_bytes)
        self.terms = terms
        self.closed = False

    @classmethod
    def host(
        cls,
        address: str,
        port: int,
        world_size: int,
        *,
        device: torch.device | str = "cpu",
        bucket_bytes: int | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Self:
        """Rank 0 of a group whose other members are told of it elsewhere, as by `GenerationWorker`; waits for them.

        `address` is this machine's own, as the others reach it. `bucket_bytes` is the size of the pieces, by default
        64 MiB on CPUs and 256 MiB on GPUs. `timeout_seconds` bounds this and every later wait.
        Raises `RefitdError` with code `collective_failed`.
        """
        device = torch.device(device)
        terms = terms_of(world_size, device, bucket_bytes)
        return cls.hosted(Listener(address, port), terms, device, timeout_seconds, threading.Event())

    @classmethod
    def hosted(
        cls,
        listener: Listener,
        terms: GroupTerms,
        device: torch.device,
        timeout_seconds: float,
        stopped: threading.Event,
    ) -> Self:
        """The same on a port that is held already, and given up with an error; until `stopped`."""
        with _typed(), listener:
            store = listener.store(timeout_seconds)
            rendezvous = Rendezvous(store, SOURCE_RANK, stopped)
            rendezvous.open(terms)
            rendezvous.join(terms.world_size, time.monotonic() + timeout_seconds)
            return cls._formed(store, rendezvous, SOURCE_RANK, terms, device, listener.address, timeout_seconds)

    @classmethod
    def join(
        cls,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        *,
        device: torch.device | str = "cpu",
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Self:
        """Another trainer rank than the host's. It has to `attend` every broadcast."""
        with _typed():
            give_up_at = time.monotonic() + timeout_seconds
            try:
                store = TCPStore(
                    address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds)
                )
            except RuntimeError as error:
                raise collective_failed(f"no group at {address} port {port}: {first_line(error)}") from None
            rendezvous = Rendezvous(store, rank)
            terms = rendezvous.join(world_size, give_up_at)
            interface = local_address(address, port)
            return cls._formed(store, rendezvous, rank, terms, torch.device(device), interface, timeout_seconds)

    @classmethod
    def _formed(
        cls,
        store: TCPStore,
        rendezvous: Rendezvous,
        rank: int,
        terms: GroupTerms,
        device: torch.device,
        interface: str,
        timeout_seconds: float,
    ) -> Self:
        prefixed = PrefixStore("group", store)
        if terms.backend == "gloo":
            made = _gloo(prefixed, rank, terms.world_size, interface, timeout_seconds)
        else:
            made = _nccl(prefixed, rank, terms.world_size)
        group = cls(made, store, rendezvous, terms, timeout_seconds)
        greeting = torch.tensor(list(GREETING), dtype=torch.uint8, device=device)
        group._wait(group._ended(group._post(greeting)))
        group._buffers = [torch.empty(terms.bucket_bytes, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        return group

    def broadcast(self, weights: Weights, specs: Sequence[TensorShape] | None = None) -> None:
        """Rank 0: sends the weights, once every worker is ready for them; they may change when this returns.

        For trainers that leave the rest to others, such as `GenerationWorker.update_weights_from_collective_async`.
        """
        tensors, layout = self.laid_out(weights, specs)
        self._wait(self.sending(self.packed(tensors, layout), layout))

    def attend(self, specs: Sequence[TensorShape]) -> None:
        """Any other trainer rank: takes part in a broadcast of these tensors, whose bytes it does not need."""
        layout = self._layout_of(tuple(announced(specs).values()))
        with self._breaking(), _typed():
            self._rendezvous.say_ready(layout.fingerprint)
            for broadcast in layout.broadcasts:
                self._wait(self._ended(self._post(self._buffers[0][: broadcast.size_bytes])))

    def laid_out(
        self, weights: Weights, specs: Sequence[TensorShape] | None
    ) -> tuple[Iterator[NamedTensor], BroadcastLayout]:
        """Raises `LayoutMismatch` for an iterator of which nobody says what it will yield."""
        if isinstance(weights, Mapping):
            shapes = tuple(layout_of(named_pairs(weights.items())).values())
            return iter(weights.items()), self._layout_of(shapes)
        if specs is None:
            raise LayoutMismatch(
                "pass specs= with an iterator: what it yields, in that order, is announced before it starts"
            )
        return named_pairs(weights), self._layout_of(tuple(announced(specs).values()))

    def packed(self, tensors: Iterator[NamedTensor], layout: BroadcastLayout) -> Iterator[PackedBroadcast]:
        """What `sending` sends, packed on the calling thread and its stream."""
        self._check_open()
        return pack_broadcasts(tensors, layout, self._buffers)

    def sending(self, packed: Iterator[PackedBroadcast], layout: BroadcastLayout) -> Generator[float]:
        """Broadcasts what is packed while the next pieces are; where there is nothing to do but wait it yields for how
        many seconds.

        Raises `RefitdError` with `collective_failed`. Leaving it early, or any error, breaks the group.
        """
        with self._breaking(), _typed():
            receivers = [rank for rank in range(self.terms.world_size) if rank != SOURCE_RANK]
            self._rendezvous.begin_refit()
            yield from self._until(
                lambda: self._rendezvous.all_ready(receivers, layout.fingerprint), "workers ready", _LOOK_SECONDS
            )
            posted: deque[tuple[Any, PackedBroadcast]] = deque()
            for broadcast in packed:
                posted.append((self._post(broadcast.view), broadcast))
                while self._is_full([each for _, each in posted]):
                    yield from self._ended(posted.popleft()[0])
            for work, _ in posted:
                yield from self._ended(work)

    def close(self) -> None:
        """Lets go of sockets and threads; the workers learn of it. A second time does nothing."""
        self.give_up("the trainer closed the group")
        assert self._end is not None, "given up"
        # Short for a group in order; one whose peer hangs ends within its own timeout, for which nobody waits.
        self._end.join(_CLOSE_SECONDS)

    def give_up(self, reason: str) -> None:
        """The same, without waiting: everybody is told the reason."""
        if self.closed:
            return
        self.closed = True
        held = [self._group, self._store]
        rendezvous = self._rendezvous
        del self._group, self._store, self._rendezvous
        self._buffers = []
        arguments = (held, rendezvous, self.terms.backend, reason)
        self._end = threading.Thread(target=_drop, args=arguments, name="refit-group-end", daemon=True)
        self._end.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _layout_of(self, shapes: tuple[TensorShape, ...]) -> BroadcastLayout:
        self._layout = self._layout.of(shapes)
        return self._layout

    def _is_full(self, under_way: Sequence[PackedBroadcast]) -> bool:
        """Whether the next piece might be packed over one that is being sent, or keep more of an iterator's tensors
        alive than the buffers hold."""
        in_buffers = sum(each.in_buffer for each in under_way)
        under_way_bytes = sum(each.view.nbytes for each in under_way)
        return in_buffers == _BUFFERS or under_way_bytes >= _BUFFERS * self.terms.bucket_bytes

    def _wait(self, steps: Iterable[float]) -> None:
        """Takes the steps, looking more often than it has to."""
        for _ in steps:
            time.sleep(_LOOK_SECONDS)

    def _post(self, view: torch.Tensor) -> Any:
        options = BroadcastOptions()
        options.rootRank = SOURCE_RANK
        options.timeout = timedelta(seconds=self._timeout_seconds)
        return self._group.broadcast([view], options)

    def _ended(self, work: Any) -> Iterator[float]:
        yield from self._until(work.is_completed, "a broadcast received", _TURN_SECONDS[self.terms.backend])
        try:
            work.wait()
        except RuntimeError as error:
            raise collective_failed(f"the broadcast broke off: {first_line(error)}") from None

    def _until(self, condition: Callable[[], bool], what: str, pause_seconds: float) -> Iterator[float]:
        began = time.monotonic()
        awake_seconds = _AWAKE_SECONDS[self.terms.backend]
        while not condition():
            waited_seconds = time.monotonic() - began
            if waited_seconds > self._timeout_seconds:
                raise collective_failed(f"no {what} within {self._timeout_seconds:g} s")
            if waited_seconds < awake_seconds:
                time.sleep(0)
            else:
                yield pause_seconds

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Members that got out of step cannot go on together."""
        self._check_open()
        try:
            yield
        except BaseException as error:
            self.give_up(f"the trainer gave up: {first_line(error)}")
            raise

    def _check_open(self) -> None:
        if self.closed:
            raise ClientClosed("this group was closed, or broke in an earlier refit: make a new one")


def local_address(address: str, port: int) -> str:
    """This machine's address on the way to another one; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def terms_of(world_size: int, device: torch.device, bucket_bytes: int | None) -> GroupTerms:
    """Raises `NotShareable` for a device, and `collective_failed` for a size, that cannot be."""
    backend = _BACKENDS.get(device.type)
    if backend is None:
        raise NotShareable(f"tensors on {device.type} cannot be broadcast, only those on {', '.join(_BACKENDS)}")
    size_bytes = BUCKET_BYTES[device.type] if bucket_bytes is None else bucket_bytes
    terms = GroupTerms(world_size=world_size, backend=backend, bucket_bytes=size_bytes)
    with _typed():
        terms.check()
    return terms


def _gloo(store: Store, rank: int, world_size: int, interface: str, timeout_seconds: float) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # only here can the interface be chosen
    options._timeout = timedelta(seconds=timeout_seconds)
    options._devices = [ProcessGroupGloo.create_device(hostname=interface)]
    try:
        return ProcessGroupGloo(store, rank, world_size, options)
    except RuntimeError as error:
        raise collective_failed(f"gloo could not connect the ranks: {first_line(error)}") from None


def _nccl(store: Store, rank: int, world_size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER  # of its watchdog
    before = {name: os.environ.get(name) for name in _NO_WATCHDOG}
    os.environ.update(_NO_WATCHDOG)
    try:
        return ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _drop(held: list[Any], rendezvous: Rendezvous, backend: GroupBackend, reason: str) -> None:
    with contextlib.suppress(ProtocolError):
        rendezvous.fail(reason)
    if backend == "nccl":
        held[0].abort()
    held.clear()


@contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        raise RefitdError(
            error.message, code=error.code, fault=error.fault, retryable=error.retryable, details=error.details
        ) from None
