"""The commands of a refit from memory that the daemon reads in place, and what every kind of refit can be told."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from refit_protocol.awake import awake
from refit_protocol.messages import (
    AttestMode,
    CommitRefit,
    InflightPolicy,
    RefitCommitted,
    RefitReport,
    ReloadWeights,
    RestoreWeights,
    WeightsRestored,
)
from refit_trainer.connection import Connection
from refit_trainer.replies import GRACE_SECONDS
from refit_trainer.writer import WriterRole

if TYPE_CHECKING:
    from refit_trainer.sharing import SharedModule

_DEADLINE_SECONDS = 300.0
# Longer than a GPU takes to copy what it can hold. A CPU needs its cores for the copy.
_AWAKE_SECONDS = {"cuda": 0.025}


class CommitOptions(TypedDict, total=False):
    """What is left out is as the daemon is configured; `deadline_seconds`, 300 by default, bounds both sides."""

    version: int | None
    policy: InflightPolicy | None
    attest: AttestMode | None
    check_finite: bool | None
    deadline_seconds: float


class RefitOptions(CommitOptions, total=False):
    """`only` names the tensors of a partial refit."""

    only: list[str] | None


def split_options(options: RefitOptions) -> tuple[list[str] | None, CommitOptions, float]:
    """The names of a partial refit, the other options with their deadline, and how long to wait for answers."""
    deadline_seconds = options.get("deadline_seconds", _DEADLINE_SECONDS)
    rest: RefitOptions = {**options, "deadline_seconds": deadline_seconds}
    only = rest.pop("only", None)
    return only, rest, deadline_seconds + GRACE_SECONDS


async def refit_in_place(
    connection: Connection, role: WriterRole, shared: SharedModule, given: RefitOptions
) -> RefitReport:
    """One message, once the source is open; the module's memory may be written again when this returns.

    `shared.memory` has been synchronised by the caller, on whose thread the writes were enqueued.
    """
    only, options, timeout_seconds = split_options(given)
    async with role.writing(timeout_seconds) as epoch:
        source = await role.source_of(shared.memory, "inplace", shared.tensors, timeout_seconds=timeout_seconds)
        command = CommitRefit(epoch=epoch, source=source, only=only, **options)
        with awake(_AWAKE_SECONDS.get(shared.device.type, 0.0)):
            return (await connection.request(command, RefitCommitted, timeout_seconds=timeout_seconds)).report


async def reload(connection: Connection, role: WriterRole, path: str | None, options: CommitOptions) -> RefitReport:
    """`path` is one of the daemon's machine; None is the model's own directory."""
    deadline_seconds = options.get("deadline_seconds", _DEADLINE_SECONDS)
    given: CommitOptions = {**options, "deadline_seconds": deadline_seconds}
    timeout_seconds = deadline_seconds + GRACE_SECONDS
    async with role.writing(timeout_seconds) as epoch:
        command = ReloadWeights(epoch=epoch, path=path, **given)
        return (await connection.request(command, RefitCommitted, timeout_seconds=timeout_seconds)).report


async def restore(connection: Connection, role: WriterRole, *, timeout_seconds: float) -> WeightsRestored:
    async with role.writing(timeout_seconds) as epoch:
        return await connection.request(RestoreWeights(epoch=epoch), WeightsRestored, timeout_seconds=timeout_seconds)
