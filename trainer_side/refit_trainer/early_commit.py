"""A commit that is sent while its trainer still looks whether its memory is what the daemon knows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refit_protocol.bell import (
    DONE_OFFSET_BYTES,
    RELEASE_OFFSET_BYTES,
    WORD_STRIDE_BYTES,
    following_release,
    withdrawal,
)
from refit_protocol.messages import RefitReport

# A daemon that has the commit in hand answers a withdrawal at once; another one may still be waiting for requests.
_ANSWER_SECONDS = 1.0


class ReleaseWord:
    """Of a bell, all of whose bytes are given; each commit has the number behind the last one's."""

    def __init__(self, bell: NDArray[np.uint8]) -> None:
        self._word = bell[RELEASE_OFFSET_BYTES:].view("<u4")[:1]
        self._done = bell.view("<u4").reshape(-1, WORD_STRIDE_BYTES // 4)[:, DONE_OFFSET_BYTES // 4]
        self._number = 0

    def following(self) -> int:
        self._number = following_release(self._number)
        return self._number

    def write(self, number: int) -> None:
        self._word[0] = number

    def holds(self, number: int) -> bool:
        return int(self._word[0]) == number

    def is_done(self, number: int, workers: int) -> bool:
        """Whether these workers hold all that was released by the number."""
        return bool((self._done[:workers] == number).all())


@dataclass(frozen=True)
class Done:
    """What so many workers tell by a bell when they have done what has the number, a moment before the daemon does."""

    word: ReleaseWord
    number: int
    workers: int

    def is_told(self) -> bool:
        """For any thread."""
        return self.word.is_done(self.number, self.workers)


class EarlyCommit:
    """Sent; nothing of the memory is read before `release`. Ends with that, or with `end`."""

    def __init__(self, word: ReleaseWord, done: Done, committing: asyncio.Task[RefitReport]) -> None:
        self._word = word
        self._number = done.number
        self.done = done
        self.committing = committing
        # Where nobody comes to it any more, as when the client was closed meanwhile.
        committing.add_done_callback(_looked_at)

    def release(self) -> None:
        """On the thread that has looked, after what marks the end of its writes."""
        self._word.write(self._number)

    async def committed(self) -> RefitReport:
        return await self.committing

    async def end(self) -> None:
        """Withdraws it, unless it was released: then it goes on at the daemon, where one worker may have seen that and
        another one not yet. Waits no longer for its answer than for that of a withdrawal."""
        if not self._word.holds(self._number):
            self._word.write(withdrawal(self._number))
        try:
            await asyncio.wait([self.committing], timeout=_ANSWER_SECONDS)
        finally:
            self.committing.cancel()
        await asyncio.wait([self.committing])


def _looked_at(committing: asyncio.Task[RefitReport]) -> None:
    """asyncio is not to complain of what its caller is told, or need not be."""
    if not committing.cancelled():
        committing.exception()
