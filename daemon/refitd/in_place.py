"""The workers' side of a commit in place: written at once, or made ready first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refit_protocol.bell import MAX_BELL_WORKERS, RELEASE_SECONDS, ring_number
from refitd.commit import Ticket
from refitd.config import RefitConfig
from refitd.engine import Engine
from refitd.source import Source
from refitd.worker_error import WorkerError


async def write_in_place(
    engine: Engine,
    config: RefitConfig,
    source: Source,
    only: Sequence[str] | None,
    ticket: Ticket,
    release: int | None = None,
) -> list[dict[str, Any]]:
    """One pass over the bytes, straight from the trainer's parameters, when it has released them if it is to; what the
    workers say of it. Behind a `ticket.check()`."""
    answers = await engine.call_workers(
        "refitd_commit",
        source.id,
        only,
        ticket.attest,
        ticket.check_finite,
        release,
        # The workers' wait ends before ours: else a trainer that says nothing would pass for an engine that hangs.
        timeout_seconds=config.deadline_seconds + (0.0 if release is None else RELEASE_SECONDS),
        writes=True,
        direct=source.replayed,
        standing=ticket.stands,
    )
    source.note_written(answers)
    return answers


async def finish_in_place(
    engine: Engine, config: RefitConfig, source: Source, only: Sequence[str] | None, ticket: Ticket
) -> list[dict[str, Any]]:
    """`write_in_place` of what was prepared: the trainer may have had the copies begin before it is asked for here, and
    whatever refuses the refit then must not open the gate over them."""
    try:
        ticket.check()
        return await write_in_place(engine, config, source, only, ticket)
    except WorkerError as error:
        error.wrote = error.wrote or await ended_with_writes(engine, config)
        raise


async def ended_with_writes(engine: Engine, config: RefitConfig) -> bool:
    """Nothing of the refit waits or runs any more on any worker; whether any of it ran."""
    ended = await engine.call_workers("refitd_abort", timeout_seconds=config.deadline_seconds, writes=True)
    return any(answer["wrote"] for answer in ended)


async def prepare_in_place(
    engine: Engine, config: RefitConfig, source: Source, only: Sequence[str] | None, ticket: Ticket, refit: int
) -> tuple[int | None, int]:
    """Everything before the first byte. Returns what the bell has to be rung with, None where nothing waits for it, and
    how many workers there are."""
    ticket.check()
    try:
        answers = await engine.call_workers(
            "refitd_prepare",
            source.id,
            only,
            ticket.attest,
            ticket.check_finite,
            ring_number(refit),
            timeout_seconds=config.deadline_seconds,
            direct=source.replayed,
        )
    except WorkerError as error:
        # On no worker may anything be waiting, where only some of them have refused.
        error.wrote = await ended_with_writes(engine, config)
        raise
    waiting = any(answer["waiting"] for answer in answers) and len(answers) <= MAX_BELL_WORKERS
    return ring_number(refit) if waiting else None, len(answers)
