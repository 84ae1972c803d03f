"""Trainer memory that has been opened, or a group that broadcasts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from refit_protocol.broadcast import BroadcastLayout
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import Segment, TensorShape
from refitd.groups import Group
from refitd.sessions import Session

COMMANDS = {
    "inplace": "CommitRefit or PrepareRefit",
    "bucket": "BeginRefit and ApplyBucket",
    "collective": "BeginRefit and ReceiveBroadcast",
}


@dataclass(eq=False)
class Source:
    """Known to the workers under the same id; `replayed` once a refit from it was plain copies alone.

    `session` is the writer's; a `group` has other ranks of the trainer, which lend memory too. `broadcasts` are those
    of a collective source's last refit.
    """

    id: int
    session: Session
    kind: Literal["inplace", "bucket", "collective"]
    segments: tuple[Segment, ...]
    replayed: bool = False
    broadcasts: BroadcastLayout | None = None
    announced: dict[str, TensorShape] | None = None
    group: Group | None = None

    def belongs_to(self, session: Session) -> bool:
        return session is self.session or (self.group is not None and self.group.has(session))

    @property
    def abandoned(self) -> bool:
        """Whether a session that lent it memory has ended."""
        return self.session.closed or (self.group is not None and self.group.failure is not None)

    def require(self, kind: Literal["inplace", "bucket", "collective"]) -> None:
        """Raises `unknown_source`, saying which command suits the source."""
        if self.kind != kind:
            message = f"source {self.id} is not {kind}, it is {self.kind}: send {COMMANDS[self.kind]}"
            raise ProtocolError(ErrorCode.UNKNOWN_SOURCE, message)

    def bucket_bytes(self, bucket: int) -> int:
        if not 0 <= bucket < len(self.segments):
            raise ProtocolError(ErrorCode.INVALID_DESCRIPTOR, f"bucket {bucket} of {len(self.segments)}")
        return self.segments[bucket].size_bytes

    def broadcasts_of(self, tensors: tuple[TensorShape, ...]) -> BroadcastLayout:
        assert self.broadcasts is not None, "a collective source has joined its group"
        self.broadcasts = self.broadcasts.of(tensors)
        return self.broadcasts

    def note_written(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """What the workers say of a refit that wrote all of it."""
        self.replayed = all(answer["path"] == "plan" for answer in answers)
