"""What refits of every kind have in common: the writer's role, a number while they are under way, and how they end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from refit_protocol.messages import AbortRefit, BeginRefit, Fact, RefitAborted, RefitBegan, Request
from refit_protocol.tensors import TensorShape
from refit_trainer.connection import Connection
from refit_trainer.errors import RefitdError
from refit_trainer.refits import CommitOptions
from refit_trainer.writer import RECONNECT_SECONDS, WriterRole, is_answer, patience, unless_restarted

_Fact = TypeVar("_Fact", bound=Fact)


class OneRefit:
    """Between `enter()` and `leave()` no other refit of this session runs. All methods belong to the event loop."""

    def __init__(self, connection: Connection, role: WriterRole, timeout_seconds: float) -> None:
        self._connection = connection
        self._role = role
        self._timeout_seconds = timeout_seconds
        self._entered = False
        self._is_ended = False
        self._epoch = 0
        self._number: int | None = None
        self._unanswered = False

    @property
    def epoch(self) -> int:
        """What the commands carry, once entered."""
        return self._epoch

    @property
    def is_under_way(self) -> bool:
        """Begun, or perhaps begun, and neither committed nor refused."""
        return self._number is not None or self._unanswered

    async def enter(self) -> None:
        self._epoch = await self._role.enter(self._timeout_seconds, self)
        self._entered = True

    async def leave(self) -> None:
        """Nothing where it was not entered, or was left before."""
        if self._entered:
            self._entered = False
            await self._role.leave()

    async def abort(self, error: BaseException) -> None:
        """Nothing if the refit was not begun. The daemon's answer does not matter: `error` is being raised.

        When this returns the daemon reads nothing of ours any more, unless it cannot be reached.
        """
        self._role.note(error)
        patience_seconds = self._abort_seconds(error)
        if self._number is not None:
            await self._abort_begun(self._number, patience_seconds)
        elif self._unanswered:
            with unless_restarted():
                # What may have been begun has no number that we know: the role that it hangs on is given up.
                await self._role.give_up(timeout_seconds=patience_seconds, reconnect_seconds=RECONNECT_SECONDS)

    async def end(self, error: BaseException) -> None:
        """Aborts and leaves, once: the second time it may be asked for is where the first one was interrupted."""
        if self._is_ended:
            return
        self._is_ended = True
        try:
            await self.abort(error)
        finally:
            await self.leave()

    async def _begin(
        self, source: int, tensors: list[TensorShape], options: CommitOptions, *, partial: bool
    ) -> RefitBegan:
        """Announces what will come from `source`; not once more what the last refit from it announced, too."""
        again = self._role.take_announced(source) == tensors
        said = [] if again else tensors
        command = BeginRefit(epoch=self._epoch, source=source, tensors=said, again=again, partial=partial, **options)
        with self._begins():
            began = await self._connection.request(command, RefitBegan, timeout_seconds=self._timeout_seconds)
        self._number = began.refit
        self._role.note_announced(source, tensors, again=again)
        return began

    async def _go_on(self, command: Request, expected: type[_Fact]) -> _Fact:
        """A command in the middle: a broken connection is soon back, and a daemon that is gone for longer has ended the
        refit by itself."""
        return await self._connection.request(
            command, expected, timeout_seconds=self._timeout_seconds, reconnect_seconds=RECONNECT_SECONDS
        )

    async def _abort_begun(self, number: int, timeout_seconds: float) -> None:
        """What it is answered does not matter: the daemon may have ended it already, or be gone."""
        self._number = None
        with unless_restarted():
            command = AbortRefit(epoch=self._epoch, refit=number)
            try:
                await self._connection.request(
                    command, RefitAborted, timeout_seconds=timeout_seconds, reconnect_seconds=RECONNECT_SECONDS
                )
            except BaseException as failure:
                if not is_answer(failure):
                    self._role.doubt()
                raise

    def _abort_seconds(self, error: BaseException) -> float:
        return patience(error, self._timeout_seconds)

    @contextlib.contextmanager
    def _begins(self) -> Iterator[None]:
        """Around a command that begins something: until its answer has come nobody knows what the daemon does."""
        self._unanswered = True
        try:
            yield
        except RefitdError as error:
            self._unanswered = not is_answer(error)
            raise
        self._unanswered = False
