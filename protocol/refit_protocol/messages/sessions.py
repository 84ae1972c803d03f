"""A session's life, and who of the sessions may write weights."""

from __future__ import annotations

from refit_protocol.messages.kinds import Command, Detail, Fact

__all__ = [
    "AcquireWriter",
    "Goodbye",
    "Heartbeat",
    "HeartbeatAcknowledged",
    "Hello",
    "LimitInfo",
    "ModelInfo",
    "ReleaseWriter",
    "SessionClosed",
    "Welcome",
    "WriterAcquired",
    "WriterReleased",
]


class Hello(Command, frozen=True, kw_only=True):
    """Opens a session, or takes up the one named by `resume` after a reconnect.

    `pid` is given by clients on the same machine: the daemon then notices their death at once.
    """

    protocol_versions: list[int]
    client: str
    pid: int | None = None
    lease_seconds: float | None = None
    resume: str | None = None


class ModelInfo(Detail, frozen=True, kw_only=True):
    """`name` is what HTTP clients ask for, `path` the directory or name that the daemon was configured with."""

    name: str
    vocab_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: list[int]
    path: str | None = None


class LimitInfo(Detail, frozen=True, kw_only=True):
    message_bytes: int
    requests_per_session: int
    prompts_per_request: int
    bucket_pieces: int
    buffered_bytes: int


class Welcome(Fact, frozen=True, kw_only=True):
    """`session` goes into the header of every later request; `epoch` changes with each start of the daemon."""

    protocol_version: int
    daemon_version: str
    session: str
    resumed: bool
    epoch: int
    lease_seconds: float
    heartbeat_seconds: float
    limits: LimitInfo
    model: ModelInfo | None


class Heartbeat(Command, frozen=True, kw_only=True):
    """Renews the lease of the session; so does every other request."""


class HeartbeatAcknowledged(Fact, frozen=True, kw_only=True):
    lease_seconds: float


class Goodbye(Command, frozen=True, kw_only=True):
    """Ends the session: its streams are cancelled, its memory unmapped, its writer role given up."""


class SessionClosed(Fact, frozen=True, kw_only=True):
    pass


class AcquireWriter(Command, frozen=True, kw_only=True):
    """Asks to be the one session that writes weights; `takeover` fences off the present writer."""

    takeover: bool = False


class WriterAcquired(Fact, frozen=True, kw_only=True):
    """`epoch` goes into every refit command; frames with an older one are refused."""

    epoch: int


class ReleaseWriter(Command, frozen=True, kw_only=True):
    pass


class WriterReleased(Fact, frozen=True, kw_only=True):
    pass


Commands = Hello | Heartbeat | Goodbye | AcquireWriter | ReleaseWriter
Facts = Welcome | HeartbeatAcknowledged | SessionClosed | WriterAcquired | WriterReleased
