"""The words of a trainer's bell that let a commit go on which was sent before its memory was looked at, and tell when
it is done."""

from __future__ import annotations

import logging
import time

from refit_protocol.bell import (
    DONE_OFFSET_BYTES,
    MAX_BELL_WORKERS,
    RELEASE_OFFSET_BYTES,
    RELEASE_SECONDS,
    WORD_STRIDE_BYTES,
    withdrawal,
)
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import MemfdSegment
from refitd.worker.boundary import PAUSE_SECONDS
from refitd.worker.memory import is_alive, map_memfd

_WORD_BYTES = 4
_AWAKE_SECONDS = 0.002
_LOOK_SECONDS = 0.005

logger = logging.getLogger(__name__)


class Release:
    """Mapped for as long as it is held."""

    def __init__(self, segment: MemfdSegment, worker: int) -> None:
        """Raises `memory_unavailable`."""
        self._pid = segment.pid
        mapped = memoryview(map_memfd(segment, writable=True))
        self._word = mapped[RELEASE_OFFSET_BYTES:][:_WORD_BYTES]
        self._done = mapped[worker * WORD_STRIDE_BYTES + DONE_OFFSET_BYTES :][:_WORD_BYTES].cast("I")

    def wait(self, number: int, seconds: float = RELEASE_SECONDS) -> None:
        """Raises `refit_failed` where the commit is withdrawn, `memory_unavailable` where the trainer's process has
        ended, `deadline_exceeded`."""
        now = time.monotonic()
        give_up, asleep_after, look = now + seconds, now + _AWAKE_SECONDS, now + _LOOK_SECONDS
        while not self._is_released(number):
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_SECONDS
                self._require_alive()
            if now > give_up:
                message = f"the trainer has neither released nor withdrawn it within {seconds:g} s"
                raise ProtocolError(ErrorCode.DEADLINE_EXCEEDED, message)
            if now > asleep_after:
                time.sleep(PAUSE_SECONDS)

    def tell_done(self, number: int) -> None:
        """For a trainer that looks at its bell, some time before the daemon's answer."""
        self._done[0] = number

    def _is_released(self, number: int) -> bool:
        found = int.from_bytes(self._word, "little")
        if found == withdrawal(number):
            raise ProtocolError(ErrorCode.REFIT_FAILED, "the trainer has withdrawn it: its memory is not what it was")
        return found == number

    def _require_alive(self) -> None:
        if not is_alive(self._pid):
            message = f"process {self._pid} ended before it released the refit from its memory"
            raise ProtocolError(ErrorCode.MEMORY_UNAVAILABLE, message)


def open_release(segment: MemfdSegment | None, worker: int) -> Release | None:
    """None where no commit can wait for it: its trainer then looks at its memory first."""
    if segment is None or worker >= MAX_BELL_WORKERS:
        return None
    try:
        return Release(segment, worker)
    except ProtocolError as error:
        logger.warning("refits begin when their trainer has looked at its memory: %s", error.message)
        return None
