"""Trainer memory that has been opened, or a group that broadcasts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from refit_protocol.bell import check_release
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


MAX_LAYOUTS = 4096


@dataclass(eq=False)
class Source:
    """Known to the workers under the same id; `replayed` once a refit from it was plain copies alone.

    `session` is the writer's; a `group` has other ranks of the trainer, which lend memory too. `broadcasts` are those
    of a collective source's last refit. `layouts` are the numbers that pieces have, to the workers too, and their
    buckets; they hold for the tensors that are `announced`. `releases`: whether every worker can wait for a release.
    `stands_by`: whether its trainer wants a refit to stand by.
    """

    id: int
    session: Session
    kind: Literal["inplace", "bucket", "collective"]
    segments: tuple[Segment, ...]
    replayed: bool = False
    releases: bool = False
    stands_by: bool = False
    broadcasts: BroadcastLayout | None = None
    announced: dict[str, TensorShape] | None = None
    layouts: dict[int, int] = field(default_factory=dict)
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

    def require_release(self, release: int) -> None:
        """Raises `invalid_descriptor`, and `unsupported` where it could not be waited for."""
        check_release(release)
        if not self.releases:
            message = f"source {self.id} has no bell by which all workers see a release: send the commit without"
            raise ProtocolError(ErrorCode.UNSUPPORTED, message)

    def announce(self, tensors: dict[str, TensorShape]) -> None:
        if tensors is not self.announced:
            self.announced = tensors
            self.layouts.clear()

    def require_layout(self, number: int, bucket: int) -> None:
        """Raises `invalid_descriptor`."""
        if self.layouts.get(number) != bucket:
            message = f"layout {number} is none of bucket {bucket} since these tensors were announced: send the pieces"
            raise ProtocolError(ErrorCode.INVALID_DESCRIPTOR, message)

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
