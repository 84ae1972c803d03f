"""Which events of which room become which figures: the rooms themselves know no metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from refitd.metrics import DaemonSnapshot, RefitdMetrics
from refitd.output import Job

if TYPE_CHECKING:
    from refitd.app import App


def observe(metrics: RefitdMetrics, app: App) -> None:
    """Connects once, before the first request."""
    app.commit.on_committed = metrics.refit_committed
    app.commit.on_failed = lambda error: metrics.refit_failed(error.code)
    app.commit.on_restored = metrics.weights_restored
    app.sessions.on_opened = metrics.session_opened
    app.sessions.on_ended = metrics.session_ended
    app.server.on_answered = metrics.command_answered
    app.server.on_refused = metrics.command_failed
    app.server.on_dropped = metrics.reply_dropped
    app.generation.on_tokens = metrics.tokens_generated
    app.generation.on_merged = metrics.deltas_merged
    app.generation.on_finished = lambda job: _count_job(metrics, job)
    metrics.watch(lambda: _snapshot(app))


def _count_job(metrics: RefitdMetrics, job: Job) -> None:
    metrics.request_accepted(sum(job.prompt_lengths))
    metrics.request_finished(job.queued_seconds, job.first_token_seconds, job.total_seconds)
    for output in job.outputs:
        metrics.output_finished(output.finish_reason or "cancelled")


def _snapshot(app: App) -> DaemonSnapshot:
    replies, size_bytes, largest_bytes = app.server.queued
    return DaemonSnapshot(
        state=app.gate.state,
        version=app.gate.version,
        load_progress=app.lifecycle.progress,
        sessions=len(app.sessions),
        writers=0 if app.refit.writer.session is None else 1,
        sources=app.refit.sources,
        running_requests=app.gate.running,
        waiting_requests=app.gate.waiting,
        queued_replies=replies,
        queued_bytes=size_bytes,
        largest_queue_bytes=largest_bytes,
        restorable=app.commit.restorable_version is not None,
    )
