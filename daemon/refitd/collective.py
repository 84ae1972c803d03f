"""How the engine's workers come into a trainer's group: asked to set out, then asked whether they have arrived."""

from __future__ import annotations

import asyncio
import time

import structlog

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import CollectiveJoined, JoinCollective
from refit_protocol.rendezvous import collective_failed
from refitd.config import RefitConfig
from refitd.engine import Engine

MAX_TIMEOUT_SECONDS = 600.0
_MAX_PORT = 65535
_LOOK_EVERY_SECONDS = 0.02
# The workers give up by themselves; this is for one that hangs in a library.
_GRACE_SECONDS = 5.0

log = structlog.get_logger()


def check_group(body: JoinCollective, workers: int) -> None:
    """Raises `invalid_descriptor` for ranks that cannot be, and `limit_exceeded` for a patience that is too long."""
    last_rank = body.first_rank + workers - 1
    if body.first_rank < 1 or last_rank >= body.world_size:
        raise ProtocolError(
            ErrorCode.INVALID_DESCRIPTOR,
            f"the engine's {workers} workers would be ranks {body.first_rank} to {last_rank} of {body.world_size}; "
            "rank 0 is the host, and the group is as large as trainer ranks and workers together",
            workers=workers,
        )
    if not body.address or not 0 < body.port <= _MAX_PORT:
        raise ProtocolError(ErrorCode.INVALID_DESCRIPTOR, f"{body.address!r} port {body.port} is no address")
    if not 0 < body.timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise ProtocolError(
            ErrorCode.LIMIT_EXCEEDED,
            f"timeout_seconds {body.timeout_seconds:g} is not above 0 and at most {MAX_TIMEOUT_SECONDS:g}",
            limit=MAX_TIMEOUT_SECONDS,
        )


async def join_group(
    engine: Engine, config: RefitConfig, source_id: int, body: JoinCollective, workers: int
) -> CollectiveJoined:
    """Returns when all workers are in the group. Raises `collective_failed` in bounded time; generation goes on."""
    where = {
        "address": body.address,
        "port": body.port,
        "world_size": body.world_size,
        "timeout_seconds": body.timeout_seconds,
        "max_bucket_bytes": config.max_broadcast_bytes,
    }
    give_up_at = time.monotonic() + body.timeout_seconds + _GRACE_SECONDS
    await engine.call_workers("refitd_join", source_id, where, body.first_rank, timeout_seconds=config.deadline_seconds)
    while True:
        answers = await engine.call_workers(
            "refitd_joined", source_id, body.plan or config.plan, timeout_seconds=config.deadline_seconds
        )
        if all(answer["joined"] for answer in answers):
            break
        if time.monotonic() > give_up_at:
            raise collective_failed(f"the group was not complete within {body.timeout_seconds:g} s")
        await asyncio.sleep(_LOOK_EVERY_SECONDS)
    log.info("group joined", source=source_id, address=body.address, port=body.port, world_size=body.world_size)
    return CollectiveJoined(
        source=source_id,
        ranks=list(range(body.first_rank, body.first_rank + workers)),
        backend=answers[0]["backend"],
        bucket_bytes=int(answers[0]["bucket_bytes"]),
    )
