"""A daemon for tests of prepared refits: it does everything at once, and writes down what it was asked."""

from __future__ import annotations

import threading
from typing import Any

from refit_protocol.bell import BELL_BYTES
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AbortRefit,
    AcquireWriter,
    CommitRefit,
    FinishRefit,
    OpenSource,
    PrepareRefit,
    RefitAborted,
    RefitCommitted,
    RefitPrepared,
    ReleaseWriter,
    SourceOpened,
    WriterAcquired,
    WriterReleased,
)
from refit_protocol.tensors import MemfdSegment
from refit_trainer.memory import Memfd
from tests.trainer.granted import REPORT
from tests.trainer.peer import Asked, Peer

EPOCH, SOURCE, REFIT, RING, WORKERS = 7, 1, 5, 17, 2


class ListedBell:
    """Writes down what is asked of it; the daemon's part is read from the same list."""

    def __init__(self) -> None:
        self._memfd = Memfd("bell", BELL_BYTES)
        self.said: list[object] = []
        self.failure: Exception | None = None
        self.ring_failure: Exception | None = None
        self.has_arrived = False

    @property
    def segment(self) -> MemfdSegment:
        return self._memfd.segment

    def make_ready(self) -> None:
        self.said.append("ready")
        if self.failure is not None:
            raise self.failure

    def ring(self, number: int, workers: int) -> None:
        self.said.append((number, workers))
        if self.ring_failure is not None:
            raise self.ring_failure

    def await_ringing(self) -> None:
        self.said.append("awaited")

    def arrived(self, number: int, workers: int) -> bool:
        assert (number, workers) == (RING, WORKERS)
        return self.has_arrived


class Answering:
    """A daemon that does everything at once, unless told to refuse."""

    def __init__(self, peer: Peer) -> None:
        self.asked: list[Any] = []
        self.refuses: dict[type, ErrorCode] = {}
        self.silent: set[type] = set()
        self.unanswered: list[Asked] = []
        self.came = threading.Semaphore(0)
        self.bell = ListedBell()
        self.ring: int | None = RING
        peer.answer = self._answer

    def since_prepared(self) -> list[type]:
        kinds = [type(body) for body in self.asked]
        return kinds[kinds.index(PrepareRefit) + 1 :]

    def _answer(self, asked: Asked) -> None:
        kind = type(asked.body)
        self.asked.append(asked.body)
        self.bell.said.append(kind.__name__)
        if kind in self.silent:
            self.unanswered.append(asked)
            self.came.release()
        elif kind in self.refuses:
            asked.fail(self.refuses[kind])
        else:
            asked.reply(self._answer_to(kind))

    def _answer_to(self, kind: type) -> Any:
        return {
            AcquireWriter: WriterAcquired(epoch=EPOCH),
            ReleaseWriter: WriterReleased(),
            OpenSource: SourceOpened(source=SOURCE, path="plan", tensors=1, size_bytes=1, unplanned=[]),
            PrepareRefit: RefitPrepared(refit=REFIT, version=4, ring=self.ring, workers=WORKERS),
            FinishRefit: RefitCommitted(report=REPORT),
            CommitRefit: RefitCommitted(report=REPORT),
            AbortRefit: RefitAborted(refit=REFIT, state="ready", version=3),  # type: ignore[arg-type]
        }[kind]
