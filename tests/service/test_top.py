"""What status and top show, rendered to text at a fixed width."""

from __future__ import annotations

import io
import json
from datetime import datetime
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import LastError, ModelInfo, RefitMilliseconds, RefitReport, RefitSummary, Status
from refit_protocol.states import EngineState
from refitd.top import (
    PHASES,
    History,
    Moment,
    duration_text,
    followed_by,
    size_text,
    status_json,
    status_view,
    top_view,
)

REPORT = RefitReport(
    version=8,
    path="plan",
    tensors=399,
    size_bytes=16_400_000_000,
    partial=False,
    policy="keep",
    unplanned=[],
    digest="00ff00ff00ff00ff",
    milliseconds=RefitMilliseconds(validate=0.11, gate=0.22, copy=8.03, attest=0.55, publish=0.05, total=8.2),
)
STATUS = Status(
    daemon_version="0.1.0",
    pid=4242,
    epoch=1,
    state=EngineState.READY,
    model=ModelInfo(name="qwen3-8b", vocab_size=512, max_model_len=4096, dtype="bfloat16", eos_token_ids=[1]),
    version=8,
    digest="00ff00ff00ff00ff",
    digest_mode="sampled",
    sleep_level=0,
    asleep_tags=[],
    progress=1.0,
    sessions=2,
    writer="trainer-0",
    running_requests=64,
    waiting_requests=3,
    restorable_version=None,
    last_refit=REPORT,
    last_error=None,
    uptime_seconds=7260.0,
    logprobs_mode="processed_logprobs",
    vllm_version="0.32.0",
    devices=["GPU-1111"],
)


def changed(status: Status, **changes: Any) -> Status:
    return msgspec.structs.replace(status, **changes)


def text_of(renderable: RenderableType, width: int = 140) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_status_shows_what_an_operator_asks_for() -> None:
    """Model, state, version, requests, writer, devices and the last refit, without a live terminal."""
    shown = text_of(status_view(STATUS))
    for part in (
        "ready",
        "qwen3-8b",
        "version 8",
        "64 running, 3 waiting",
        "trainer-0",
        "GPU-1111",
        "8.03",
        "2 h 1 min",
    ):
        assert part in shown


def test_status_shows_where_http_clients_find_the_model() -> None:
    """The base URL, and the name to ask for."""
    shown = text_of(status_view(changed(STATUS, http_url="http://127.0.0.1:8000/v1")))
    assert "http://127.0.0.1:8000/v1, model qwen3-8b" in shown


def test_the_last_error_is_shown() -> None:
    """Code and message, as the trainer that caused it saw them, and when that was."""
    when = datetime(2026, 5, 4, 13, 14, 15).astimezone().timestamp()
    error = LastError(code=ErrorCode.NOT_FINITE, message="lm_head.weight holds NaN", unix_seconds=when)
    shown = text_of(status_view(changed(STATUS, last_error=error)))
    assert "2026-05-04 13:14:15: not_finite: lm_head.weight holds NaN" in shown


def test_a_torn_engine_says_what_to_do() -> None:
    """It serves nothing until somebody acts."""
    assert "-> refitd reload" in text_of(status_view(changed(STATUS, state=EngineState.TORN)))
    assert "->" not in text_of(status_view(STATUS))


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({"state": EngineState.REFITTING, "open_refit": "receiving"}, "refitting: more is to come of the trainer"),
        ({"state": EngineState.REFITTING, "open_refit": "prepared"}, "refitting: prepared, the engine waits for"),
        ({"state": EngineState.REFITTING, "open_refit": "held"}, "refitting: all is written, the trainer is to"),
        ({"stands_by": True}, "ready, a refit stands by"),
    ],
)
def test_what_an_engine_waits_for_is_said(status: dict[str, Any], says: str) -> None:
    """Else nobody would know why nothing is generated, nor whether refits stand by at all."""
    seen = changed(STATUS, **status)
    for view in (status_view(seen), top_view(History(Moment(1.0, seen)), "e")):
        assert says in text_of(view)


def test_eighty_columns_are_enough() -> None:
    """No heading and no unit is cut or wrapped in a plain terminal or a pipe, also where refits are slow."""
    slow = RefitMilliseconds(validate=1.11, gate=59999.0, copy=98765.4, attest=99.99, publish=0.05, total=160_001.0)
    report = msgspec.structs.replace(REPORT, version=123_456, path="loader", milliseconds=slow)
    history = followed_by(History(), Moment(1.0, changed(STATUS, last_refit=report)))
    for view in (status_view(changed(STATUS, last_refit=report)), top_view(history, "ipc:///run/x")):
        shown = text_of(view, width=80)
        [headings, row] = [line.split() for line in shown.splitlines() if "validate" in line or "123456" in line]
        cells = [cell for cell in headings if cell != "│"]
        assert cells == ["version", "path", "size", "rate", "total", *PHASES]
        assert [cell for cell in row if cell != "│"] == [
            *("123456", "loader", "16.4", "GB", "102", "MB/s", "160001"),
            *("1.11", "59999", "98765", "99.99", "0.05"),
        ]


def test_loading_shows_a_bar() -> None:
    """How far the load is, before there is any model to name."""
    loading = changed(STATUS, state=EngineState.LOADING, progress=0.25, model=None, last_refit=None)
    shown = text_of(status_view(loading))
    assert "25%" in shown
    assert "not loaded" in shown


def test_before_and_after_the_weights_the_phase_is_named() -> None:
    """Nobody knows how long an engine starts or warms up: no number is made up for it."""
    for phase in ("starting the engine", "warming up"):
        loading = changed(STATUS, state=EngineState.LOADING, progress=1.0, load_phase=phase, last_refit=None)
        shown = text_of(status_view(loading))
        assert phase in shown
        assert "%" not in shown


def test_json_is_the_reply_itself() -> None:
    """Programs get every field of the status under its name on the wire."""
    parsed = json.loads(status_json(STATUS))
    assert (parsed["version"], parsed["state"], parsed["last_refit"]["size_bytes"]) == (8, "ready", 16_400_000_000)


def test_top_before_and_after_the_first_answer() -> None:
    """It starts before the daemon does, and says whom it waits for, and over TCP what else might be wrong."""
    assert "waiting for a daemon at ipc:///run/x" in text_of(top_view(History(), "ipc:///run/x"))
    assert "wrong CURVE keys look like this, too" in text_of(top_view(History(), "tcp://10.0.0.5:7777"))
    shown = text_of(top_view(followed_by(History(), Moment(1.0, STATUS)), "ipc:///run/x"))
    assert "qwen3-8b" in shown
    assert "2 TB/s" in shown


def test_token_rate_needs_two_looks_in_one_life() -> None:
    """The rate is the difference of two looks; a restart in between makes them incomparable."""
    once = followed_by(History(), Moment(10.0, STATUS, generated_tokens=1000))
    assert once.tokens_per_second is None
    twice = followed_by(once, Moment(12.0, STATUS, generated_tokens=5000))
    assert twice.tokens_per_second == 2000
    assert "2,000/s" in text_of(top_view(twice, ""))
    restarted = followed_by(twice, Moment(14.0, changed(STATUS, epoch=2), generated_tokens=10))
    assert restarted.tokens_per_second is None


def versions_listed(shown: str) -> list[int]:
    rows = [line.strip(" │").split() for line in shown.splitlines()]
    return [int(row[0]) for row in rows if len(row) > 1 and row[1] == "plan"]


def test_all_refits_between_two_looks_are_listed() -> None:
    """In the daemon's order, newest first, from the first look on."""
    several = [
        RefitSummary(version=version, path="plan", size_bytes=1000, milliseconds=REPORT.milliseconds)
        for version in (8, 7, 5)
    ]
    history = followed_by(History(), Moment(1.0, changed(STATUS, recent_refits=several)))
    assert versions_listed(text_of(top_view(history, ""))) == [8, 7, 5]


def test_a_daemon_that_only_says_its_last_refit_is_shown_with_it() -> None:
    """One that is older than the program that looks."""
    history = followed_by(History(), Moment(1.0, STATUS))
    assert versions_listed(text_of(top_view(history, ""))) == [8]


def test_a_refit_in_progress_shows() -> None:
    """While weights are being written there is a bar for it."""
    refitting = changed(STATUS, state=EngineState.REFITTING)
    assert "refitting" in text_of(top_view(followed_by(History(), Moment(1.0, refitting)), ""))


@pytest.mark.parametrize("state", list(EngineState))
def test_every_state_can_be_shown(state: EngineState) -> None:
    """A state added to the protocol has its style here."""
    assert state.value in text_of(status_view(changed(STATUS, state=state)))


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (16.4e9, "16.4 GB"), (2.14e12, "2.14 TB"), (5e15, "5e+03 TB")]
)
def test_sizes(size: float, text: str) -> None:
    """Three digits and a unit."""
    assert size_text(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(5.9, "5 s"), (61, "1 min"), (7260, "2 h 1 min"), (200_000, "2 d 7 h")])
def test_durations(seconds: float, text: str) -> None:
    """The two largest units."""
    assert duration_text(seconds) == text
