"""The workers' side of a commit in place: written at once, or made ready first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refit_protocol.bell import MAX_BELL_WORKERS, ring_number
from refitd.commit import Ticket
from refitd.config import RefitConfig
from refitd.engine import Engine, WorkerError
from refitd.source import Source


async def write_in_place(
    engine: Engine, config: RefitConfig, source: Source, only: Sequence[str] | None, ticket: Ticket
) -> list[dict[str, Any]]:
    """One pass over the bytes, straight from the trainer's parameters; what the workers say of it."""
    ticket.check()
    answers = await engine.call_workers(
        "refitd_commit",
        source.id,
        only,
        ticket.attest,
        ticket.check_finite,
        timeout_seconds=config.deadline_seconds,
        writes=True,
        direct=source.replayed,
    )
    source.note_written(answers)
    return answers


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
        # The engine goes on: on no worker may anything be waiting, where only some of them have refused.
        ended = await engine.call_workers("refitd_abort", timeout_seconds=config.deadline_seconds)
        error.wrote = any(answer["wrote"] for answer in ended)
        raise
    waiting = any(answer["waiting"] for answer in answers) and len(answers) <= MAX_BELL_WORKERS
    return ring_number(refit) if waiting else None, len(answers)
