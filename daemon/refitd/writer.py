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
        if self.session is not session:
            raise self._stale(epoch)
        self.check_epoch(epoch)

    def check_epoch(self, epoch: int) -> None:
        """For sessions that only lend memory to the present writer: raises `stale_epoch`."""
        if self.session is None or epoch != self.epoch:
            raise self._stale(epoch)

    def _acquisition(self, session: Session, *, takeover: bool) -> WriterEvent:
        if self.session is None:
            return WriterEvent.ACQUIRED
        if self.session is session:
            return WriterEvent.ACQUIRED_AGAIN
        if takeover:
            return WriterEvent.TAKEN_OVER
        raise ProtocolError(
            ErrorCode.WRITER_BUSY,
            f"{self.session.client!r} (pid {self.session.pid}) is the writer until its session ends or it lets go of"
            " the role (release_writer); acquire_writer(takeover=True) takes it over",
            writer=self.session.client,
        )

    def _stale(self, epoch: int) -> ProtocolError:
        if epoch == self.epoch:
            reason = f"epoch {epoch} is over, or another session's"
        else:
            reason = f"epoch {epoch} is not the present writer's ({self.epoch})"
        message = f"{reason}: acquire the role and open the source again"
        return ProtocolError(ErrorCode.STALE_EPOCH, message, epoch=self.epoch)

    def _step(self, event: WriterEvent) -> None:
        self.state = step(WRITER_TRANSITIONS, self.state, event)
        if event in NEW_EPOCH:
            self.epoch += 1
