"""What every kind of refit can be told, and the refits that are one command: from disk, and from what was kept."""

from __future__ import annotations

from typing import TypedDict

from refit_protocol.messages import (
    AttestMode,
    InflightPolicy,
    RefitCommitted,
    RefitReport,
    ReloadWeights,
    RestoreWeights,
    WeightsRestored,
)
from refit_trainer.connection import Connection
from refit_trainer.options import Names, Seconds, Version, check_options
from refit_trainer.replies import GRACE_SECONDS
from refit_trainer.writer import WriterRole

_DEADLINE_SECONDS = 300.0


class CommitOptions(TypedDict, total=False):
    """What is left out is as the daemon is configured; `deadline_seconds`, 300 by default, bounds both sides."""

    version: Version | None
    policy: InflightPolicy | None
    attest: AttestMode | None
    check_finite: bool | None
    deadline_seconds: Seconds


class RefitOptions(CommitOptions, total=False):
    """`only` names the tensors of a partial refit."""

    only: Names | None


class PrepareOptions(RefitOptions, total=False):
    """`hold_seconds`: how long the engine waits for the refit."""

    hold_seconds: Seconds | None


def split_options(options: RefitOptions) -> tuple[list[str] | None, CommitOptions, float]:
    """The names of a partial refit, the other options with their deadline, and how long to wait for answers. Raises as
    `check_options` does."""
    check_options("refit", options, RefitOptions)
    deadline_seconds = options.get("deadline_seconds", _DEADLINE_SECONDS)
    rest: RefitOptions = {**options, "deadline_seconds": deadline_seconds}
    only = rest.pop("only", None)
    return only, rest, deadline_seconds + GRACE_SECONDS


async def reload(connection: Connection, role: WriterRole, path: str | None, options: CommitOptions) -> RefitReport:
    """`path` is one of the daemon's machine; None is the model's own directory."""
    check_options("reload", options, CommitOptions)
    deadline_seconds = options.get("deadline_seconds", _DEADLINE_SECONDS)
    given: CommitOptions = {**options, "deadline_seconds": deadline_seconds}
    timeout_seconds = deadline_seconds + GRACE_SECONDS
    async with role.writing(timeout_seconds) as epoch:
        command = ReloadWeights(epoch=epoch, path=path, **given)
        return (await connection.request(command, RefitCommitted, timeout_seconds=timeout_seconds)).report


async def restore(connection: Connection, role: WriterRole, *, timeout_seconds: float) -> WeightsRestored:
    async with role.writing(timeout_seconds) as epoch:
        return await connection.request(RestoreWeights(epoch=epoch), WeightsRestored, timeout_seconds=timeout_seconds)
