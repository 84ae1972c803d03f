"""What can be asked without changing anything."""

from __future__ import annotations

from typing import Literal

from refit_protocol.errors import ErrorCode
from refit_protocol.messages.kinds import AttestMode, Command, Detail, Fact, SleepTag
from refit_protocol.messages.refits import RefitReport, RefitSummary
from refit_protocol.messages.sessions import ModelInfo
from refit_protocol.states import EngineState
from refit_protocol.tensors import DType

__all__ = [
    "GetDigest",
    "GetLoggerMetrics",
    "GetManifest",
    "GetStatus",
    "LastError",
    "LoadPhase",
    "LoggerMetrics",
    "Manifest",
    "ManifestTensor",
    "OpenPhase",
    "Status",
    "WeightsDigest",
]

LoadPhase = Literal["starting the engine", "loading weights", "warming up"]
OpenPhase = Literal["receiving", "prepared", "held"]


class GetStatus(Command, frozen=True, kw_only=True):
    """Needs no session."""


class LastError(Detail, frozen=True, kw_only=True):
    code: ErrorCode
    message: str
    unix_seconds: float


class Status(Fact, frozen=True, kw_only=True):
    """What is true now. `digest` is of the weights that are served, as 16 hex digits, None while they are torn."""

    daemon_version: str
    pid: int
    epoch: int
    state: EngineState
    model: ModelInfo | None
    version: int
    digest: str | None
    digest_mode: AttestMode
    sleep_level: int
    asleep_tags: list[SleepTag]
    progress: float
    sessions: int
    writer: str | None
    running_requests: int
    waiting_requests: int
    restorable_version: int | None
    last_refit: RefitReport | None
    last_error: LastError | None
    uptime_seconds: float
    logprobs_mode: str
    generated_tokens: int = 0
    http_url: str | None = None
    vllm_version: str | None = None
    devices: list[str] = []
    adapters: list[str] = []
    load_phase: LoadPhase | None = None
    recent_refits: list[RefitSummary] = []
    open_refit: OpenPhase | None = None
    stands_by: bool = False


class GetManifest(Command, frozen=True, kw_only=True):
    pass


class ManifestTensor(Detail, frozen=True, kw_only=True):
    """A tensor that a full refit must bring, unless `optional`; `alias_of` names the tensor it is tied to."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    optional: bool = False
    alias_of: str | None = None


class Manifest(Fact, frozen=True, kw_only=True):
    tensors: list[ManifestTensor]


class GetDigest(Command, frozen=True, kw_only=True):
    """Reads the engine's memory and answers what is served: see `refit_protocol.digest` for the definition."""

    mode: Literal["sampled", "full"] = "sampled"


class WeightsDigest(Fact, frozen=True, kw_only=True):
    version: int
    mode: Literal["sampled", "full"]
    digest: str


class GetLoggerMetrics(Command, frozen=True, kw_only=True):
    """Asks for the engine's figures, sampled at a fixed interval since they were last cleared."""

    clear: bool = False


class LoggerMetrics(Fact, frozen=True, kw_only=True):
    """One list an engine figure, all of one length; `interval_seconds` lies between two samples."""

    interval_seconds: float
    samples: dict[str, list[float]]


Commands = GetStatus | GetManifest | GetDigest | GetLoggerMetrics
Facts = Status | Manifest | WeightsDigest | LoggerMetrics
