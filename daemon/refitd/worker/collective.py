"""Collective sources: a trainer elsewhere broadcasts its weights into staging buffers of the workers' own.

The group stands beside vLLM's: torch.distributed's default group is never touched.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions

from refit_protocol.broadcast import Broadcast, BroadcastLayout
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
from refitd.worker.buckets import Announcement, BucketRefit, BucketSource
from refitd.worker.copies import Copy
from refitd.worker.group_end import GroupEnd
from refitd.worker.sources import Segments
from refitd.worker.weights import EngineWeights

logger = logging.getLogger(__name__)

BUFFERS = 2
_CONNECT_PAUSE_SECONDS = 0.05
# A piece over NVLink takes less than falling asleep and waking up.
_AWAKE_SECONDS = 0.002
_PAUSE_SECONDS = 0.001
_LOOK_SECONDS = 0.1
# To gloo a wait of 0 ms is one without end.
_SHORTEST_WAIT_SECONDS = 0.001
# NCCL's own watchdog would end the engine's process; every wait here is bounded without it.
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
_NEVER = timedelta(days=1)

_BACKENDS: dict[str, GroupBackend] = {"cpu": "gloo", "cuda": "nccl"}


class GroupAddress(msgspec.Struct, frozen=True):
    """Where the trainer hosts the group and which rank this worker is to be; `timeout_seconds` bounds every wait."""

    address: str
    port: int
    world_size: int
    rank: int
    timeout_seconds: float
    max_bucket_bytes: int


class BroadcastGroup:
    """The receiving end of a process group that belongs to nobody else."""

    def __init__(
        self,
        group: Any,
        store: Store,
        rendezvous: Rendezvous,
        terms: GroupTerms,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self._group = group
        self._store = store
        self._rendezvous = rendezvous
        self._device = device
        self.timeout_seconds = timeout_seconds
        self._lookout: Lookout | None = None
        self.terms = terms

    def begin(self, fingerprint: str) -> None:
        """Tells the sender that broadcasts of this layout may come."""
        self.end()
        self._lookout = Lookout(self._rendezvous, fingerprint)

    def end(self) -> None:
        if self._lookout is not None:
            self._lookout.end()
            self._lookout = None

    def post(self, target: torch.Tensor) -> Any:
        """Begins to receive a broadcast, after what the current stream has been given to do so far."""
        options = BroadcastOptions()
        options.rootRank = SOURCE_RANK
        options.timeout = timedelta(seconds=self.timeout_seconds)
        return self._group.broadcast([target], options)

    def has_come(self, work: Any, until: float, give_up_at: float) -> bool:
        """Whether by `until` a broadcast has come whole, for this thread and its stream.

        Raises `collective_failed` for one that has not come at `give_up_at`, or cannot come.
        """
        comes_within = _WAITS[self.terms.backend]
        while not comes_within(work, max(_SHORTEST_WAIT_SECONDS, min(_LOOK_SECONDS, until - time.monotonic()))):
            now = time.monotonic()
            if now > give_up_at:
                raise collective_failed("the trainer's broadcast did not come in time")
            if self._lookout is not None and self._lookout.error is not None:
                raise self._lookout.error
            if now > until:
                return False
        try:
            work.wait()
        except RuntimeError as error:
            raise collective_failed(f"the trainer's broadcast broke off: {first_line(error)}") from None
        return True

    def close(self, posted: Sequence[Any] = ()) -> GroupEnd:
        """Leaves the group, in the background; the end of what is `posted` can be waited for."""
        self.end()
        held = [self._group, self._store, self._rendezvous]
        del self._group, self._store, self._rendezvous
        return GroupEnd(self.terms.backend, held, posted, self._device)


def _waited(work: Any, seconds: float) -> bool:
    """gloo's own wait takes nothing from the cores that carry the bytes; it raises when the time is over."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        return bool(work.is_completed())
    return True


def _polled(work: Any, seconds: float) -> bool:
    """NCCL's would have the stream wait instead, and nobody could end that."""
    began = time.monotonic()
    while not work.is_completed():
        waited_seconds = time.monotonic() - began
        if waited_seconds > seconds:
            return False
        time.sleep(0 if waited_seconds < _AWAKE_SECONDS else _PAUSE_SECONDS)
    return True


_WAITS: dict[GroupBackend, Callable[[Any, float], bool]] = {"gloo": _waited, "nccl": _polled}


class Lookout:
    """Talks with the group's host during one refit, in a thread of its own: a host that is stopped never answers.

    NCCL does not notice by itself that the other side has given up or is dead.
    """

    def __init__(self, rendezvous: Rendezvous, fingerprint: str) -> None:
        self._rendezvous = rendezvous
        self._fingerprint = fingerprint
        self._ended = threading.Event()
        self.error: ProtocolError | None = None
        threading.Thread(target=self._run, name="refit-group-lookout", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        try:
            self._rendezvous.say_ready(self._fingerprint)
            while not self._ended.wait(_LOOK_SECONDS):
                self._rendezvous.raise_if_failed()
        except ProtocolError as error:
            self.error = error


class Joining:
    """A worker on its way into a group, in a thread of its own: the engine generates meanwhile."""

    def __init__(self, where: GroupAddress, device: torch.device) -> None:
        self._where = where
        self._device = device
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._group: BroadcastGroup | None = None
        self._error: ProtocolError | None = None
        threading.Thread(target=self._run, name="refit-group-join", daemon=True).start()

    def group(self) -> BroadcastGroup | None:
        """None while the thread is under way. Raises what it failed with."""
        if self._error is not None:
            raise self._error
        return self._group

    def close(self) -> None:
        """Gives up; a group that is there, or comes late, is dropped."""
        with self._lock:
            self._stopped.set()
            if self._group is not None:
                self._group.close()

    def _run(self) -> None:
        try:
            group = _joined(self._where, self._device, self._stopped)
        except ProtocolError as error:
            self._error = error
        # The boundary of the thread: whoever asks for the group is told.
        except Exception as error:
            logger.exception("joining the group failed")
            self._error = collective_failed(f"the group could not be made: {first_line(error)}")
        else:
            with self._lock:
                self._group = group
                if self._stopped.is_set():
                    group.close()


@dataclass(frozen=True)
class OwnBuffer:
    """Staging memory of this process, in the place of a trainer's that is mapped."""

    data: torch.Tensor
    written: None = None

    def close(self) -> None:
        """It goes with its last tensor."""


class CollectiveSource(BucketSource):
    """A bucket source whose buckets are broadcasts."""

    def __init__(self, group: BroadcastGroup, device: torch.device, planned: bool) -> None:
        size_bytes = group.terms.bucket_bytes
        self._buffers = [_buffer(size_bytes, device) for _ in range(BUFFERS)]
        super().__init__(Segments.around([OwnBuffer(buffer) for buffer in self._buffers]), planned)
        self.group = group
        self.reception: Reception | None = None
        self.ending: GroupEnd | None = None
        self._layout = BroadcastLayout((), size_bytes)
        self._places: tuple[Announcement | None, list[torch.Tensor | None]] = None, []

    def begin(self, weights: EngineWeights, refit: BucketRefit) -> Reception:
        """Everything announced has been validated: tells the sender, and awaits the first broadcast."""
        self._layout = self._layout.of(tuple(refit.announced.tensors.values()))
        self.group.begin(self._layout.fingerprint)
        places = self._places_of(weights, refit.announced)
        self.reception = Reception(self.group, refit, self._layout, self._buffers, places)
        return self.reception

    def close(self) -> None:
        """The end of what is being received can be waited for: `ending`."""
        posted = [] if self.reception is None else self.reception.posted
        self.reception = None
        self.ending = self.group.close(posted)
        self._places = None, []
        super().close()

    def _places_of(self, weights: EngineWeights, announced: Announcement) -> list[torch.Tensor | None]:
        """Those of the last refit, where it announced the same with the same plan."""
        if self._places[0] is not announced:
            places = [self._place(weights, announced, broadcast) for broadcast in self._layout.broadcasts]
            self._places = announced, places
        return self._places[1]

    def _place(self, weights: EngineWeights, announced: Announcement, broadcast: Broadcast) -> torch.Tensor | None:
        """The engine's own memory for a broadcast that is all one run of one parameter, as it is; else None."""
        piece = broadcast.pieces[0]
        if len(broadcast.pieces) > 1 or piece.name in weights.aliases:
            return None
        copies = self._copies(weights, announced, 0, piece)
        if len(copies) != 1 or not _is_one_run(copies[0], piece.count):
            return None
        offset = copies[0].transfer.target.offset
        return copies[0].target.detach()[offset : offset + piece.count].view(torch.uint8)


class Reception:
    """The broadcasts of one refit in their order: the next ones are under way while one is copied.

    Those that have no place of their own in the engine come into the buffers in turn.
    """

    def __init__(
        self,
        group: BroadcastGroup,
        refit: BucketRefit,
        layout: BroadcastLayout,
        buffers: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor | None],
    ) -> None:
        self.refit = refit
        self._group = group
        self._broadcasts = layout.broadcasts
        self._buffers = buffers
        # What is written before anything has come could not be called unchanged if nothing ever comes.
        self._places = [None, *places[1:]]
        self._room_bytes = sum(buffer.nbytes for buffer in buffers)
        self._number = 0
        self._waiting_since = time.monotonic()
        self._posted: list[Any] = []
        self._into: list[int | None] = []
        if self._may_post():
            self._post_one()

    @property
    def is_complete(self) -> bool:
        return self._number == len(self._broadcasts)

    @property
    def posted(self) -> list[Any]:
        """Broadcasts that are being received, perhaps into the engine's memory."""
        return [work for work in self._posted if work is not None]

    def arrivals(self, seconds: float, timeout_seconds: float) -> Iterator[Callable[[], None]]:
        """For about `seconds`, what to do with each broadcast that has come; from the first one on the engine's memory
        may be written. Raises `collective_failed` for one that does not come.
        """
        began = time.monotonic()
        until = began + seconds
        while not self.is_complete and time.monotonic() < until:
            number = self._number
            while self._may_post():
                self._post_one()
            give_up_at = min(began + timeout_seconds, self._waiting_since + self._group.timeout_seconds)
            if not self._group.has_come(self._posted[number], until, give_up_at):
                return
            self._posted[number] = None
            self._number += 1
            self._waiting_since = time.monotonic()
            self._end_when_complete()
            yield partial(self._take, number)

    def _end_when_complete(self) -> None:
        if self.is_complete:
            self._group.end()

    def _take(self, number: int) -> None:
        broadcast = self._broadcasts[number]
        self.refit.accept(broadcast.pieces)
        buffer = self._into[number]
        if buffer is None:
            self.refit.note_written(broadcast.size_bytes)
        else:
            self.refit.copy(buffer, broadcast.pieces)

    def _may_post(self) -> bool:
        """Another one, behind those that have not been taken; into the engine only once the first has come."""
        number = len(self._posted)
        if number == len(self._broadcasts):
            return False
        if self._places[number] is None:
            return sum(buffer is not None for buffer in self._into[self._number :]) < len(self._buffers)
        under_way = sum(broadcast.size_bytes for broadcast in self._broadcasts[self._number : number + 1])
        return self._number > 0 and under_way <= self._room_bytes

    def _post_one(self) -> None:
        number = len(self._posted)
        place = self._places[number]
        if place is None:
            buffer = sum(into is not None for into in self._into) % len(self._buffers)
            place = self._buffers[buffer][: self._broadcasts[number].size_bytes]
            self._into.append(buffer)
        else:
            self._into.append(None)
        self._posted.append(self._group.post(place))


def _is_one_run(copy: Copy, count: int) -> bool:
    boxes = copy.transfer
    return (
        copy.source.dtype == copy.target.dtype
        and boxes.elements == count
        and boxes.source.is_run
        and boxes.target.is_run
    )


def _joined(where: GroupAddress, device: torch.device, stopped: threading.Event) -> BroadcastGroup:
    # gloo's threads inherit this thread's CPUs, and the engine's threads may be bound to one each.
    os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
    give_up_at = time.monotonic() + where.timeout_seconds
    interface = _reached(where, give_up_at, stopped)
    timeout = timedelta(seconds=where.timeout_seconds)
    store = _store(where, timeout)
    rendezvous = Rendezvous(store, where.rank, stopped)
    terms = rendezvous.join(where.world_size, give_up_at)
    _check_terms(terms, where, device, rendezvous)
    prefixed = PrefixStore("group", store)
    made = _gloo(prefixed, where, interface, timeout) if terms.backend == "gloo" else _nccl(prefixed, where)
    group = BroadcastGroup(made, store, rendezvous, terms, device, where.timeout_seconds)
    _greet(group, device, give_up_at - time.monotonic())
    return group


def _reached(where: GroupAddress, give_up_at: float, stopped: threading.Event) -> str:
    """Our own address on the way to the host, once it can be reached. TCPStore itself would log every failed try."""
    while True:
        left_seconds = max(0.01, give_up_at - time.monotonic())
        try:
            with socket.create_connection((where.address, where.port), timeout=left_seconds) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() + _CONNECT_PAUSE_SECONDS > give_up_at:
                reason = f"{where.address} port {where.port} cannot be reached from the engine: {error}"
                raise collective_failed(reason) from None
        if stopped.wait(_CONNECT_PAUSE_SECONDS):
            raise collective_failed("given up before the group's host could be reached")


def _store(where: GroupAddress, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(where.address, where.port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        reason = f"what answers at {where.address} port {where.port} is no group of refitd: {first_line(error)}"
        raise collective_failed(reason) from None


def _check_terms(terms: GroupTerms, where: GroupAddress, device: torch.device, rendezvous: Rendezvous) -> None:
    suitable = _BACKENDS.get(device.type)
    if terms.backend != suitable:
        rendezvous.fail(f"the group's backend is {terms.backend}, but an engine on {device.type} needs {suitable}")
    if terms.bucket_bytes > where.max_bucket_bytes:
        rendezvous.fail(f"pieces of {terms.bucket_bytes} bytes, at most {where.max_bucket_bytes} are allowed")


def _gloo(store: Store, where: GroupAddress, interface: str, timeout: timedelta) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # only here can the interface be chosen
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=interface)]
    try:
        return ProcessGroupGloo(store, where.rank, where.world_size, options)
    except RuntimeError as error:
        raise collective_failed(f"gloo could not connect the ranks: {first_line(error)}") from None


def _nccl(store: Store, where: GroupAddress) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    before = {name: os.environ.get(name) for name in _NO_WATCHDOG}
    os.environ.update(_NO_WATCHDOG)
    try:
        return ProcessGroupNCCL(store, where.rank, where.world_size, options)
    finally:
        _put_back(before)


def _put_back(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def _greet(group: BroadcastGroup, device: torch.device, timeout_seconds: float) -> None:
    """One small broadcast: NCCL connects only now, and both sides see that bytes come through."""
    received = torch.zeros(len(GREETING), dtype=torch.uint8, device=device)
    group.has_come(group.post(received), math.inf, time.monotonic() + timeout_seconds)
    if bytes(received.cpu().tolist()) != GREETING:
        raise collective_failed("the first broadcast brought other bytes than were sent")


def _buffer(size_bytes: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        message = f"no room for {BUFFERS} staging buffers of {size_bytes} bytes in the engine: {first_line(error)}"
        raise ProtocolError(ErrorCode.MEMORY_UNAVAILABLE, message) from None
