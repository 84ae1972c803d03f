"""How trainer and engine workers find each other before they form a group, through the trainer's key-value store.

The store is PyTorch's TCPStore, of which only a few calls are needed. Whoever finds something wrong says so there: then
nobody waits for what cannot come any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NoReturn, Protocol

import msgspec

from refit_protocol.broadcast import ALIGNMENT_BYTES
from refit_protocol.errors import ErrorCode, ProtocolError

GroupBackend = Literal["gloo", "nccl"]

# It stands for the layout of the broadcasts too.
RENDEZVOUS_VERSION = 2
# The host of the store is the one that broadcasts.
SOURCE_RANK = 0
# What the source broadcasts once, to show that the group works.
GREETING = bytes(range(64))

_TERMS = "refit/terms"
_FAILED = "refit/failed"
# The host writes the terms as soon as the store is there: this only spans a scheduling gap.
_TERMS_SECONDS = 2.0
_POLL_SECONDS = 0.01


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used; it raises RuntimeError where its host does not answer."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...


class GroupTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What the host lays down for all: JSON under `refit/terms`."""

    world_size: int
    backend: GroupBackend
    bucket_bytes: int
    version: int = RENDEZVOUS_VERSION

    def check(self) -> None:
        """Raises `collective_failed` for terms that cannot be."""
        if self.version != RENDEZVOUS_VERSION:
            raise collective_failed(
                f"the host speaks version {self.version}, not {RENDEZVOUS_VERSION}: use one release"
            )
        if self.bucket_bytes <= 0 or self.bucket_bytes % ALIGNMENT_BYTES:
            raise collective_failed(f"bucket_bytes {self.bucket_bytes} is not a multiple of {ALIGNMENT_BYTES}")


class Rendezvous:
    """One member's view of the store. Every call raises `collective_failed` when the host is gone."""

    def __init__(self, store: Store, rank: int, stopped: threading.Event | None = None) -> None:
        self._store = store
        self._rank = rank
        self._stopped = stopped or threading.Event()
        self._refits = 0

    def open(self, terms: GroupTerms) -> None:
        """The host's first call."""
        self._set(_TERMS, msgspec.json.encode(terms).decode())

    def join(self, world_size: int, give_up_at: float) -> GroupTerms:
        """Returns when all ranks are there; the error says which are missing (`details.missing`) or what is wrong.

        `give_up_at` is a time of `time.monotonic()`.
        """
        terms = self._terms()
        if terms.world_size != world_size:
            self.fail(f"rank {self._rank} was told of {world_size} ranks, but the group has {terms.world_size}")
        if not 0 <= self._rank < world_size:
            self.fail(f"rank {self._rank} is not in a group of {world_size}")
        if self._add(_joined(self._rank)) > 1:
            self.fail(f"two members have rank {self._rank}: every worker and every trainer process needs its own")
        self._wait_for_ranks(world_size, give_up_at)
        return terms

    def fail(self, reason: str, **details: object) -> NoReturn:
        """Tells everybody, and raises it."""
        self._set(_FAILED, reason)
        raise collective_failed(reason, **details)

    def raise_if_failed(self) -> None:
        """Raises what another member reported, or that the host's process is gone."""
        if self._has(_FAILED):
            raise collective_failed(self._get(_FAILED))

    # --- refits -------------------------------------------------------------------------------------------------------

    def say_ready(self, fingerprint: str) -> None:
        """A receiver's: all is validated, broadcasts of this layout may come."""
        self._refits += 1
        self._set(_ready(self._refits, self._rank), fingerprint)

    def begin_refit(self) -> None:
        """The sender's, before it asks who is ready."""
        self._refits += 1

    def all_ready(self, ranks: Sequence[int], fingerprint: str) -> bool:
        """The sender's; raises if a receiver expects other tensors."""
        keys = [_ready(self._refits, rank) for rank in ranks]
        if not self._has(*keys):
            self.raise_if_failed()
            return False
        if any(self._get(key) != fingerprint for key in keys):
            self.fail("the tensors to be sent differ from the announced ones in names, dtypes, shapes or order")
        for key in keys:
            self._delete(key)
        return True

    # --- inside -------------------------------------------------------------------------------------------------------

    def _terms(self) -> GroupTerms:
        give_up_at = time.monotonic() + _TERMS_SECONDS
        while not self._has(_TERMS):
            if time.monotonic() > give_up_at:
                raise collective_failed(
                    "what answers there is no group of refitd, perhaps a plain torch.distributed one: the trainer has "
                    "to make the group with Daemon.collective() or BroadcastGroup of refit_trainer"
                )
            self._pause()
        try:
            terms = msgspec.json.decode(self._get(_TERMS), type=GroupTerms)
        except msgspec.MsgspecError as error:
            raise collective_failed(f"the terms of the group's host cannot be read: {error}") from None
        terms.check()
        return terms

    def _wait_for_ranks(self, world_size: int, give_up_at: float) -> None:
        while not self._has(*(_joined(rank) for rank in range(world_size))):
            self.raise_if_failed()
            if time.monotonic() > give_up_at:
                missing = [rank for rank in range(world_size) if not self._has(_joined(rank))]
                self.fail(f"ranks {missing} of {world_size} did not join in time", missing=missing)
            self._pause()

    def _pause(self) -> None:
        if self._stopped.wait(_POLL_SECONDS):
            raise collective_failed("given up before the group was complete")

    def _has(self, *keys: str) -> bool:
        with _host_answers():
            return self._store.check(list(keys))

    def _get(self, key: str) -> str:
        with _host_answers():
            return self._store.get(key).decode(errors="replace")

    def _set(self, key: str, value: str) -> None:
        with _host_answers():
            self._store.set(key, value)

    def _add(self, key: str) -> int:
        with _host_answers():
            return self._store.add(key, 1)

    def _delete(self, key: str) -> None:
        with _host_answers():
            self._store.delete_key(key)


def collective_failed(reason: str, **details: object) -> ProtocolError:
    return ProtocolError(ErrorCode.COLLECTIVE_FAILED, reason, **details)


def first_line(error: BaseException) -> str:
    """PyTorch's messages go on with a stack of C++ frames."""
    return str(error).partition("\n")[0] or type(error).__name__


@contextmanager
def _host_answers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise collective_failed(f"the group's host does not answer any more: {first_line(error)}") from None


def _joined(rank: int) -> str:
    return f"refit/joined/{rank}"


def _ready(refit: int, rank: int) -> str:
    return f"refit/ready/{refit}/{rank}"
