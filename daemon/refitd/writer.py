"""Who may write weights: at most one session, told apart from its predecessors by the epoch."""

from __future__ import annotations

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.sessions import Session


class Writer:
    """`epoch` rises with every new writer; it starts at the daemon's own epoch, so frames of an earlier run are stale
    too.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.session: Session | None = None

    def acquire(self, session: Session, *, takeover: bool) -> int:
        """Raises `writer_busy` where another session writes and `takeover` was not asked for."""
        if self.session is session:
            return self.epoch
        if self.session is not None and not takeover:
            raise ProtocolError(
                ErrorCode.WRITER_BUSY,
                f"{self.session.client!r} (pid {self.session.pid}) writes the weights: wait for it, or take over",
                writer=self.session.client,
            )
        self.session = session
        self.epoch += 1
        return self.epoch

    def release(self, session: Session) -> None:
        if self.session is session:
            self.session = None

    def check(self, session: Session, epoch: int) -> None:
        """Raises `stale_epoch` for any frame that is not of the present writer."""
        if self.session is not session or epoch != self.epoch:
            raise ProtocolError(
                ErrorCode.STALE_EPOCH,
                f"epoch {epoch} is not the present writer's ({self.epoch}): send AcquireWriter, open the source again",
                epoch=self.epoch,
            )
