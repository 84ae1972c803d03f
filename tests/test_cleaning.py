"""NaN in the KV cache, taken out while requests are served. No vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import CommitRefit, RefitCommitted, Sleep, SleepStateChanged
from tests.scripted_app import ScriptedApp, loaded_app, worker_refusal

CLEANED = ["freeze", "refitd_cache_is_finite", "freeze", "refitd_clean_cache", "thaw"]


async def cleaned(scripted: ScriptedApp) -> None:
    """Returns when the cleaning that is under way, or is to come, has ended."""
    task = scripted.app.commit.cleaning.task
    assert task is not None
    await task


def test_nan_is_cleaned_away_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps, with all that requests have computed thrown away; what makes NaN meanwhile is cleaned too."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            scripted.llm.calls.clear()
            cleaning = scripted.llm.hold("refitd_clean_cache")
            scripted.app.engine.note_nan()
            await cleaning.begun.wait()
            scripted.app.engine.note_nan()
            cleaning.may_end.set()
            await cleaned(scripted)
            assert scripted.llm.calls == CLEANED * 2
            assert not scripted.llm.nan_seen

    asyncio.run(run())


def test_nan_that_left_nothing_behind_disturbs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a grammar that allows no token: nobody prefills again for it."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            scripted.llm.calls.clear()
            scripted.llm.failures["refitd_cache_is_finite"] = {"finite": True}
            scripted.app.engine.note_nan()
            await cleaned(scripted)
            assert not scripted.llm.nan_seen
            assert scripted.llm.calls == ["freeze", "refitd_cache_is_finite", "thaw"]

    asyncio.run(run())


def test_a_refit_waits_for_the_cleaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not refused, and the engine is not thawed in its middle."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            session, epoch = await scripted.writer()
            source = await scripted.open(session, epoch)
            scripted.llm.calls.clear()
            cleaning = scripted.llm.hold("refitd_clean_cache")
            scripted.app.engine.note_nan()
            await cleaning.begun.wait()
            command = CommitRefit(epoch=epoch, source=source)
            refit = asyncio.create_task(scripted.ask(session, command, RefitCommitted))
            await asyncio.sleep(0)
            cleaning.may_end.set()
            await refit
            assert scripted.llm.calls == [*CLEANED, "is_sleeping", "refitd_commit"]

    asyncio.run(run())


def test_nothing_is_cleaned_in_an_engine_that_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of sleep waits for a cleaning, and none begins behind it."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            session = scripted.session()
            scripted.llm.calls.clear()
            cleaning = scripted.llm.hold("refitd_clean_cache")
            scripted.app.engine.note_nan()
            await cleaning.begun.wait()
            asleep = asyncio.create_task(scripted.ask(session, Sleep(), SleepStateChanged))
            await asyncio.sleep(0)
            cleaning.may_end.set()
            await asleep
            assert scripted.llm.calls[:5] == CLEANED
            assert scripted.llm.calls[-1] == "sleep 1"
            scripted.app.engine.note_nan()
            await cleaned(scripted)
            assert scripted.llm.calls[-1] == "sleep 1"

    asyncio.run(run())


def test_a_cleaning_that_fails_lets_the_engine_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again with the next NaN, or by the next refit."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            scripted.llm.failures["refitd_clean_cache"] = worker_refusal(ErrorCode.INTERNAL)
            scripted.app.engine.note_nan()
            await cleaned(scripted)
            assert scripted.llm.nan_seen
            del scripted.llm.failures["refitd_clean_cache"]
            scripted.app.engine.note_nan()
            await cleaned(scripted)
            assert not scripted.llm.nan_seen

    asyncio.run(run())
