"""What Prometheus can ask: the daemon's own figures, beside vLLM's in the same registry.

Events are counted when they happen; what is a state (queues, sessions, version) is read at each scrape from one
snapshot, so a gauge cannot drift from the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from refit_protocol.errors import ERROR_RULES, ErrorCode
from refit_protocol.messages import RefitReport
from refit_protocol.states import EngineState

# From a fused copy of a small model to a loader on a slow disk.
REFIT_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.012, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0)
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
UNARY_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)

REFIT_PHASES = ("validate", "gate", "copy", "attest", "publish", "total", "waited")


@dataclass(frozen=True)
class DaemonSnapshot:
    """What is true at one instant. `queued_bytes` is of replies that clients have not taken yet."""

    state: EngineState
    version: int
    load_progress: float
    sessions: int
    writers: int
    sources: int
    running_requests: int
    waiting_requests: int
    queued_replies: int
    queued_bytes: int
    largest_queue_bytes: int
    restorable: bool


class RefitdMetrics:
    """Counters and histograms of one daemon; `watch` adds the gauges once there is something to look at."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._info = Info("refitd", "Which daemon, vLLM and model this is.", registry=registry)
        self._refits = Counter("refitd_refits", "Committed refits.", ["path", "policy"], registry=registry)
        self._refits_stood_by = Counter(
            "refitd_refits_stood_by", "Committed refits that had stood by until then.", registry=registry
        )
        self._refit_failures = Counter("refitd_refit_failures", "Refits that failed.", ["code"], registry=registry)
        self._refit_bytes = Counter("refitd_refit_bytes", "Weight bytes committed by refits.", registry=registry)
        self._refit_phases = Histogram(
            "refitd_refit_phase_seconds",
            "Time of each phase of a committed refit.",
            ["phase", "path"],
            buckets=REFIT_SECONDS,
            registry=registry,
        )
        self._refit_rate = Gauge(
            "refitd_refit_last_bytes_per_second", "Rate of the last refit, over all of its phases.", registry=registry
        )
        self._unplanned = Gauge(
            "refitd_refit_last_unplanned_tensors",
            "Tensors of the last refit that no plan covers.",
            registry=registry,
        )
        self._restores = Counter("refitd_restores", "Times the kept weights were put back.", registry=registry)
        self._sessions_opened = Counter("refitd_sessions_opened", "Sessions opened.", registry=registry)
        self._sessions_ended = Counter("refitd_sessions_ended", "Sessions ended, and why.", ["why"], registry=registry)
        self._failures = Counter(
            "refitd_failed_replies", "Requests answered with a typed failure.", ["code", "fault"], registry=registry
        )
        self._unary = Histogram(
            "refitd_command_seconds",
            "From decoding a command to its last reply, generation and refits apart.",
            ["command"],
            buckets=UNARY_SECONDS,
            registry=registry,
        )
        self._outputs = Counter("refitd_outputs", "Generated outputs that ended.", ["finish_reason"], registry=registry)
        self._prompt_tokens = Counter("refitd_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry)
        self._tokens = Counter("refitd_generated_tokens", "Tokens generated.", registry=registry)
        self._queue_seconds = Histogram(
            "refitd_request_queue_seconds",
            "From accepting a request to its first scheduling.",
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        self._first_token_seconds = Histogram(
            "refitd_request_first_token_seconds",
            "From accepting a request to its first token.",
            buckets=REQUEST_SECONDS,
            registry=registry,
        )
        self._request_seconds = Histogram(
            "refitd_request_seconds", "From accepting a request to its end.", buckets=REQUEST_SECONDS, registry=registry
        )
        self._merged = Counter(
            "refitd_merged_deltas", "Token deltas merged because a client reads slowly.", registry=registry
        )
        # Exported from the start, so that an alert on it has something to compare with: it must stay at zero.
        self._dropped = Counter("refitd_dropped_replies", "Replies lost on the way to a client.", registry=registry)
        self._engine_answer = Histogram(
            "refitd_engine_answer_seconds", "Round trip of the liveness call.", buckets=UNARY_SECONDS, registry=registry
        )
        self._engine_missed = Counter(
            "refitd_engine_missed_answers", "Liveness calls not answered in time.", registry=registry
        )
        self._load_seconds = Gauge("refitd_load_seconds", "Time the last model load took.", registry=registry)

    def watch(self, read: Callable[[], DaemonSnapshot]) -> None:
        """Has the gauges read by `read` at each scrape, which may come from any thread."""
        self._registry.register(_SnapshotCollector(read))

    def model_loaded(self, model: str, refitd_version: str, vllm_version: str, load_seconds: float) -> None:
        self._info.info({"model": model, "version": refitd_version, "vllm": vllm_version})
        self._load_seconds.set(load_seconds)

    def refit_committed(self, report: RefitReport) -> None:
        self._refits.labels(report.path, report.policy).inc()
        self._refits_stood_by.inc(report.stood_by)
        self._refit_bytes.inc(report.size_bytes)
        self._unplanned.set(len(report.unplanned))
        # Only prepared refits wait for their trainers: that others did not is no measurement.
        phases = REFIT_PHASES if report.milliseconds.waited else REFIT_PHASES[:-1]
        for phase in phases:
            self._refit_phases.labels(phase, report.path).observe(getattr(report.milliseconds, phase) / 1e3)
        if report.milliseconds.total > 0:
            self._refit_rate.set(report.size_bytes / (report.milliseconds.total / 1e3))

    def refit_failed(self, code: ErrorCode) -> None:
        self._refit_failures.labels(code).inc()

    def weights_restored(self) -> None:
        self._restores.inc()

    def session_opened(self) -> None:
        self._sessions_opened.inc()

    def session_ended(self, why: str) -> None:
        """`why` is one of the table's events that end a session (`SESSION_ENDS`)."""
        self._sessions_ended.labels(why).inc()

    def command_answered(self, command: str, seconds: float) -> None:
        """`command` is the name of a message type, never a text of the client's."""
        self._unary.labels(command).observe(seconds)

    def command_failed(self, code: ErrorCode) -> None:
        self._failures.labels(code, ERROR_RULES[code].fault).inc()

    def request_accepted(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def request_finished(self, queued_seconds: float, first_token_seconds: float, total_seconds: float) -> None:
        self._queue_seconds.observe(queued_seconds)
        self._first_token_seconds.observe(first_token_seconds)
        self._request_seconds.observe(total_seconds)

    def output_finished(self, finish_reason: str) -> None:
        self._outputs.labels(finish_reason).inc()

    def tokens_generated(self, count: int) -> None:
        self._tokens.inc(count)

    def deltas_merged(self, count: int) -> None:
        self._merged.inc(count)

    def reply_dropped(self) -> None:
        self._dropped.inc()

    def engine_answered(self, seconds: float) -> None:
        self._engine_answer.observe(seconds)

    def engine_missed_answer(self) -> None:
        self._engine_missed.inc()


class _SnapshotCollector(Collector):
    def __init__(self, read: Callable[[], DaemonSnapshot]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        return snapshot_gauges(self._read())

    def describe(self) -> Iterator[Metric]:
        # Without this the registry would call `collect`, and so `read`, at registration.
        return iter(())


def snapshot_gauges(snapshot: DaemonSnapshot) -> Iterator[Metric]:
    yield _state_gauge(snapshot.state)
    values: dict[str, tuple[str, float]] = {
        "refitd_weights_version": ("Version of the weights that are served.", snapshot.version),
        "refitd_load_progress": ("How much of the model is loaded, 0 to 1.", snapshot.load_progress),
        "refitd_sessions": ("Open sessions.", snapshot.sessions),
        "refitd_writers": ("Sessions that may write weights, 0 or 1.", snapshot.writers),
        "refitd_sources": ("Open sources of trainer memory.", snapshot.sources),
        "refitd_requests_running": ("Requests the engine works on.", snapshot.running_requests),
        "refitd_requests_waiting": ("Requests that wait for the engine or its gate.", snapshot.waiting_requests),
        "refitd_queued_replies": ("Replies that clients have not taken yet.", snapshot.queued_replies),
        "refitd_queued_bytes": ("Bytes of these replies.", snapshot.queued_bytes),
        "refitd_largest_queue_bytes": ("The largest of the clients' queues.", snapshot.largest_queue_bytes),
        "refitd_restorable": ("Whether the last committed weights could be put back.", float(snapshot.restorable)),
    }
    for name, (documentation, value) in values.items():
        yield GaugeMetricFamily(name, documentation, value=value)


def _state_gauge(current: EngineState) -> Metric:
    gauge = GaugeMetricFamily("refitd_engine_state", "1 for the state the engine is in.", labels=["state"])
    for state in EngineState:
        gauge.add_metric([state], float(state is current))
    return gauge
