"""Who may write weights: at most one session, told apart from its predecessors by the epoch."""

from __future__ import annotations

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.states import NEW_EPOCH, WRITER_TRANSITIONS, WriterEvent, WriterState, step
from refitd.sessions import Session


class Writer:
    """`epoch` rises with every new writer; it starts at the daemon's own, so frames of an earlier run are stale too."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.state = WriterState.FREE
        self.session: Session | None = None

    def acquire(self, session: Session, *, takeover: bool) -> int:
        """The epoch to write with. Raises `writer_busy` where another session writes and there is no `takeover`."""
        self._step(self._acquisition(session, takeover=takeover))
        self.session = session
        return self.epoch

    def release(self, session: Session) -> None:
        if self.session is session:
            self._step(WriterEvent.RELEASED)
            self.session = None

    def check(self, session: Session, epoch: int) -> None:
        """Raises `stale_epoch` for any frame that is not of the present writer."""
        if self.session is not None and self.session is not session:
            raise self._taken_over(self.session, epoch)
        self.check_epoch(epoch)

    def check_epoch(self, epoch: int) -> None:
        """For sessions that only lend memory to the present writer: raises `stale_epoch`."""
        again = "acquire the role and open the source again"
        if self.session is None:
            raise self._stale(f"the writer's role was given up, and with it epoch {epoch}: {again}")
        if epoch != self.epoch:
            raise self._stale(f"epoch {epoch} is not the present writer's ({self.epoch}): {again}")

    def _acquisition(self, session: Session, *, takeover: bool) -> WriterEvent:
        if self.session is None:
            return WriterEvent.ACQUIRED
        if self.session is session:
            return WriterEvent.ACQUIRED_AGAIN
        if takeover:
            return WriterEvent.TAKEN_OVER
        raise ProtocolError(
            ErrorCode.WRITER_BUSY,
            f"{_named(self.session)} is the writer until its session ends or it lets go of the role (release_writer);"
            " acquire_writer(takeover=True) takes it over",
            writer=self.session.client,
        )

    def _taken_over(self, writer: Session, epoch: int) -> ProtocolError:
        return self._stale(
            f"{_named(writer)} is the writer now, in epoch {self.epoch} and not {epoch}: what this session had begun"
            " was aborted. Refit again when it lets go of the role (release_writer), or take the role back"
            " (acquire_writer(takeover=True))"
        )

    def _stale(self, message: str) -> ProtocolError:
        return ProtocolError(ErrorCode.STALE_EPOCH, message, epoch=self.epoch)

    def _step(self, event: WriterEvent) -> None:
        self.state = step(WRITER_TRANSITIONS, self.state, event)
        if event in NEW_EPOCH:
            self.epoch += 1


def _named(session: Session) -> str:
    return f"{session.client!r} (pid {session.pid})"
