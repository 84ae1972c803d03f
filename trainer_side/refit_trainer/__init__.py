"""What a trainer uses of refitd: connect to a daemon, refit it with your weights, and generate.

Importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from refit_protocol.errors import ErrorCode, Fault
from refit_protocol.messages import Sampling, Status, VersionRun
from refit_protocol.tensors import DType, TensorShape
from refit_trainer.aio import AsyncDaemon
from refit_trainer.client import Daemon
from refit_trainer.errors import (
    ClientClosed,
    DaemonRestarted,
    DaemonUnreachable,
    FleetMismatch,
    FleetRefitFailed,
    FleetRefitRefused,
    LayoutMismatch,
    MemberLost,
    NoMember,
    NotShareable,
    OtherModel,
    OutputIncomplete,
    RefitdError,
    RequestTimedOut,
    SessionLost,
    SettingsMismatch,
    UsedAfterFork,
    VersionsMixed,
)
from refit_trainer.fleet.aio import AsyncFleet
from refit_trainer.fleet.client import Fleet
from refit_trainer.fleet.members import FleetStatus, MemberState, MemberStatus
from refit_trainer.fleet.refits import FleetReport
from refit_trainer.link import CurveKeys
from refit_trainer.prepared import AsyncPreparedRefit, PreparedRefit
from refit_trainer.report import RefitReport
from refit_trainer.stream import Alternatives, Delta, Sample

if TYPE_CHECKING:
    from refit_trainer.process_group import BroadcastGroup
    from refit_trainer.sharing import share_parameters, unshare_parameters

__all__ = [
    "Alternatives",
    "AsyncDaemon",
    "AsyncFleet",
    "AsyncPreparedRefit",
    "BroadcastGroup",
    "ClientClosed",
    "CurveKeys",
    "DType",
    "Daemon",
    "DaemonRestarted",
    "DaemonUnreachable",
    "Delta",
    "ErrorCode",
    "Fault",
    "Fleet",
    "FleetMismatch",
    "FleetRefitFailed",
    "FleetRefitRefused",
    "FleetReport",
    "FleetStatus",
    "LayoutMismatch",
    "MemberLost",
    "MemberState",
    "MemberStatus",
    "NoMember",
    "NotShareable",
    "OtherModel",
    "OutputIncomplete",
    "PreparedRefit",
    "RefitReport",
    "RefitdError",
    "RequestTimedOut",
    "Sample",
    "Sampling",
    "SessionLost",
    "SettingsMismatch",
    "Status",
    "TensorShape",
    "UsedAfterFork",
    "VersionRun",
    "VersionsMixed",
    "share_parameters",
    "unshare_parameters",
]

_NEEDS_TORCH = {
    "BroadcastGroup": "refit_trainer.process_group",
    "share_parameters": "refit_trainer.sharing",
    "unshare_parameters": "refit_trainer.sharing",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
