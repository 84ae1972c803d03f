"""What the daemon does when a part of it fails that nobody waits for. No vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from refit_protocol.states import EngineState
from refitd.app import ExitCode
from tests.scripted_app import ScriptedApp, running_app
from tests.test_liveness import WATCHED


def fail(*_: object) -> None:
    raise AssertionError("made by the test")


def break_liveness(scripted: ScriptedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted.app._notifier, "watchdog", fail)


def break_leases(scripted: ScriptedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted.app.sessions, "_config", None)


@pytest.mark.parametrize(
    ("task", "break_it"), [("liveness", break_liveness), ("lease-expiry", break_leases)], ids=["liveness", "leases"]
)
def test_a_daemon_stops_when_a_task_that_nobody_waits_for_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    break_it: Callable[[ScriptedApp, pytest.MonkeyPatch], None],
) -> None:
    """Nobody would look after the engine, or the leases, any more: it says why, drains, and is restarted."""

    async def run() -> None:
        leases = {"lease_seconds": 0.03}
        async with running_app(tmp_path, monkeypatch, engine=WATCHED, server=leases) as (scripted, ended):
            states: list[EngineState] = []
            scripted.app.gate.on_change = states.append
            with monkeypatch.context() as broken:
                break_it(scripted, broken)
                await asyncio.wait({ended}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
            assert await ended is ExitCode.INTERNAL
            assert states == [EngineState.DRAINING]

    with capture_logs() as lines:
        asyncio.run(run())
    (line,) = [line for line in lines if "exc_info" in line]
    assert line["task"] == task
    assert line["log_level"] == "error"
