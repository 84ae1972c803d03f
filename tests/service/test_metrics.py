"""What a scrape shows, through prometheus_client's own text format."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import RefitMilliseconds, RefitReport
from refit_protocol.states import EngineState
from refitd.metrics import REFIT_PHASES, DaemonSnapshot, RefitdMetrics

SNAPSHOT = DaemonSnapshot(
    state=EngineState.READY,
    version=7,
    load_progress=1.0,
    sessions=2,
    writers=1,
    sources=1,
    running_requests=64,
    waiting_requests=3,
    queued_replies=5,
    queued_bytes=4096,
    largest_queue_bytes=2048,
    restorable=False,
)
REPORT = RefitReport(
    version=8,
    path="plan",
    tensors=399,
    size_bytes=16_000_000_000,
    partial=False,
    policy="keep",
    unplanned=[],
    digest="00ff00ff00ff00ff",
    milliseconds=RefitMilliseconds(validate=0.1, gate=0.2, copy=8.0, attest=0.5, publish=0.05, total=10.0),
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> RefitdMetrics:
    return RefitdMetrics(registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_a_refit_shows_every_phase(registry: CollectorRegistry, metrics: RefitdMetrics) -> None:
    """Count, bytes, rate and one histogram a phase, in seconds and bytes."""
    metrics.refit_committed(REPORT)
    assert value(registry, "refitd_refits_total", path="plan", policy="keep") == 1
    assert value(registry, "refitd_refit_bytes_total") == 16e9
    assert value(registry, "refitd_refit_last_bytes_per_second") == 1.6e12
    seconds = {
        phase: value(registry, "refitd_refit_phase_seconds_sum", phase=phase, path="plan")
        for phase in ("validate", "gate", "copy", "attest", "publish", "total")
    }
    assert seconds == pytest.approx(
        {"validate": 0.0001, "gate": 0.0002, "copy": 0.008, "attest": 0.0005, "publish": 0.00005, "total": 0.01}
    )


def test_only_a_prepared_refit_has_waited(registry: CollectorRegistry, metrics: RefitdMetrics) -> None:
    """The others would make its trainer's steps look short."""
    metrics.refit_committed(REPORT)
    waited = msgspec.structs.replace(REPORT.milliseconds, waited=50.0)
    metrics.refit_committed(msgspec.structs.replace(REPORT, milliseconds=waited))
    labels = {"phase": "waited", "path": "plan"}
    assert value(registry, "refitd_refit_phase_seconds_count", **labels) == 1
    assert value(registry, "refitd_refit_phase_seconds_sum", **labels) == 0.05


def test_refits_that_stood_by_are_counted(registry: CollectorRegistry, metrics: RefitdMetrics) -> None:
    for stood_by in (False, True, True):
        metrics.refit_committed(msgspec.structs.replace(REPORT, stood_by=stood_by))
    assert value(registry, "refitd_refits_stood_by_total") == 2


def test_every_phase_of_a_report_is_exported() -> None:
    """A phase added to the wire's report is not forgotten here."""
    assert set(REFIT_PHASES) == set(RefitMilliseconds.__struct_fields__)


def test_gauges_are_read_at_the_scrape(registry: CollectorRegistry, metrics: RefitdMetrics) -> None:
    """A gauge shows what is true when asked, not when something last changed."""
    current = SNAPSHOT
    metrics.watch(lambda: current)
    assert value(registry, "refitd_weights_version") == 7
    current = replace(SNAPSHOT, version=8, state=EngineState.TORN)
    assert value(registry, "refitd_weights_version") == 8
    states = {state: value(registry, "refitd_engine_state", state=state) for state in EngineState}
    assert [state for state, on in states.items() if on] == [EngineState.TORN]


def test_failures_say_whose_fault(registry: CollectorRegistry, metrics: RefitdMetrics) -> None:
    """A dashboard tells a trainer's mistakes from the engine's."""
    metrics.command_failed(ErrorCode.MANIFEST_MISMATCH)
    metrics.command_failed(ErrorCode.ENGINE_DEAD)
    metrics.refit_failed(ErrorCode.MANIFEST_MISMATCH)
    assert value(registry, "refitd_failed_replies_total", code="manifest_mismatch", fault="client") == 1
    assert value(registry, "refitd_failed_replies_total", code="engine_dead", fault="engine") == 1
    assert value(registry, "refitd_refit_failures_total", code="manifest_mismatch") == 1


def test_requests_sessions_and_tokens(registry: CollectorRegistry, metrics: RefitdMetrics) -> None:
    """Every event of a request's and a session's life has its figure."""
    metrics.session_opened()
    metrics.session_ended("death")
    metrics.request_accepted(prompt_tokens=10)
    metrics.tokens_generated(16)
    metrics.tokens_generated(16)
    metrics.deltas_merged(3)
    metrics.output_finished("stop")
    metrics.request_finished(queued_seconds=0.001, first_token_seconds=0.02, total_seconds=1.5)
    metrics.command_answered("GetStatus", 0.0002)
    metrics.engine_answered(0.001)
    metrics.engine_missed_answer()
    metrics.weights_restored()
    metrics.model_loaded("qwen3", "0.1.0", "0.32.0", load_seconds=12.5)
    expected = {
        ("refitd_sessions_opened_total", ()): 1,
        ("refitd_sessions_ended_total", (("why", "death"),)): 1,
        ("refitd_prompt_tokens_total", ()): 10,
        ("refitd_generated_tokens_total", ()): 32,
        ("refitd_merged_deltas_total", ()): 3,
        ("refitd_outputs_total", (("finish_reason", "stop"),)): 1,
        ("refitd_request_queue_seconds_sum", ()): 0.001,
        ("refitd_request_first_token_seconds_sum", ()): 0.02,
        ("refitd_request_seconds_sum", ()): 1.5,
        ("refitd_command_seconds_count", (("command", "GetStatus"),)): 1,
        ("refitd_engine_answer_seconds_count", ()): 1,
        ("refitd_engine_missed_answers_total", ()): 1,
        ("refitd_restores_total", ()): 1,
        ("refitd_load_seconds", ()): 12.5,
    }
    assert {key: value(registry, key[0], **dict(key[1])) for key in expected} == expected


def test_drops_are_exported_before_the_first_one(registry: CollectorRegistry, metrics: RefitdMetrics) -> None:
    """An alert on lost replies needs the zero to be there, and sees the first loss."""
    assert value(registry, "refitd_dropped_replies_total") == 0
    metrics.reply_dropped()
    assert value(registry, "refitd_dropped_replies_total") == 1


def test_a_scrape_is_valid_and_documented(registry: CollectorRegistry, metrics: RefitdMetrics) -> None:
    """The text parses, every family is ours by prefix and has a help text."""
    metrics.watch(lambda: SNAPSHOT)
    metrics.refit_committed(REPORT)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert all(family.name.startswith("refitd") and family.documentation for family in families)
