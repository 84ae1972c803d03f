"""The window of a refit: what a failure in it says about the weights. No vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from refit_protocol.bell import RELEASE_SECONDS
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    BeginRefit,
    CommitRefit,
    RefitCommitted,
    RefitReport,
    ReleaseWriter,
    WriterReleased,
)
from refit_protocol.states import EngineState
from refitd.commit import REPORTS_KEPT
from tests.scripted_app import OPENED, loaded_app, worker_refusal


def test_a_cache_that_cannot_be_cleaned_refuses_the_refit_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else new weights would be served under the old version and digest, as nothing says that anything was written."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            session, epoch = await scripted.writer()
            source = await scripted.open(session, epoch)
            scripted.llm.nan_seen = True
            scripted.llm.failures["refitd_clean_cache"] = worker_refusal(ErrorCode.INTERNAL)
            with pytest.raises(ProtocolError) as refused:
                await scripted.ask(session, CommitRefit(epoch=epoch, source=source), RefitCommitted)
            assert refused.value.code is ErrorCode.INTERNAL
            assert "refitd_commit" not in scripted.llm.calls
            assert (scripted.app.gate.state, scripted.app.gate.version) == (EngineState.READY, 0)
            del scripted.llm.failures["refitd_clean_cache"]
            await scripted.ask(session, CommitRefit(epoch=epoch, source=source), RefitCommitted)
            assert not scripted.llm.nan_seen
            assert scripted.llm.calls.index("refitd_clean_cache") < scripted.llm.calls.index("refitd_commit")

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["inplace", "bucket"])
def test_what_waits_for_requests_ends_with_the_writers_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["inplace", "bucket"]
) -> None:
    """A trainer that gives up before its commit or begin is answered has no number to abort it by. After the release
    the gate is open, and nothing of the trainer's memory has been read or will be."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            gate = scripted.app.gate
            session, epoch = await scripted.writer()
            source = await scripted.open(session, epoch, kind)
            gate.enter()
            command = CommitRefit if kind == "inplace" else BeginRefit
            refit = asyncio.create_task(
                scripted.ask(session, command(epoch=epoch, source=source, policy="finish"), RefitCommitted)
            )
            while gate.state is not EngineState.REFITTING:  # noqa: ASYNC110 - the gate has no event for it
                await asyncio.sleep(0)
            await scripted.ask(session, ReleaseWriter(), WriterReleased)
            with pytest.raises(ProtocolError) as ended:
                await refit
            assert ended.value.code is ErrorCode.REFIT_FAILED
            assert await gate.admit() == 0
            gate.leave()
            assert not {"refitd_commit", "refitd_begin"} & {*scripted.llm.calls}

    asyncio.run(run())


def test_weights_that_cannot_be_kept_are_committed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer hears what is served; that nothing can be put back is in the status."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch, refit={"keep_last": "host"}) as scripted:
            session, epoch = await scripted.writer()
            source = await scripted.open(session, epoch)
            scripted.llm.failures["refitd_keep_last"] = worker_refusal(ErrorCode.INTERNAL)
            command = CommitRefit(epoch=epoch, source=source)
            committed = await scripted.ask(session, command, RefitCommitted)
            gate, commit = scripted.app.gate, scripted.app.commit
            assert (committed.report.version, gate.version, gate.state) == (1, 1, EngineState.READY)
            assert commit.restorable_version is None
            del scripted.llm.failures["refitd_keep_last"]
            await scripted.ask(session, command, RefitCommitted)
            assert commit.restorable_version == 2

    asyncio.run(run())


def test_the_last_refits_are_in_the_status_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were published; the oldest are forgotten."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            session, epoch = await scripted.writer()
            source = await scripted.open(session, epoch)
            command = CommitRefit(epoch=epoch, source=source)
            reports = [(await scripted.ask(session, command, RefitCommitted)).report for _ in range(REPORTS_KEPT + 2)]
            scripted.llm.failures["refitd_commit"] = worker_refusal(ErrorCode.NOT_FINITE)
            with pytest.raises(ProtocolError):
                await scripted.ask(session, command, RefitCommitted)
            status = scripted.app.lifecycle.read_status()
            latest = reports[: -REPORTS_KEPT - 1 : -1]
            assert [(refit.version, refit.milliseconds) for refit in status.recent_refits] == [
                (report.version, report.milliseconds) for report in latest
            ]
            assert status.last_refit == latest[0]

    asyncio.run(run())


def test_what_is_committed_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the metrics, which may have it a moment later than the trainer has its answer and the status the report."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            commit, counted = scripted.app.commit, asyncio.Event()
            reports: list[RefitReport] = []

            def count(report: RefitReport) -> None:
                reports.append(report)
                counted.set()

            commit.on_committed = count
            session, epoch = await scripted.writer()
            source = await scripted.open(session, epoch)
            answer = await scripted.ask(session, CommitRefit(epoch=epoch, source=source), RefitCommitted)
            assert commit.reports[0] is answer.report
            await counted.wait()
            assert reports == [answer.report]

    asyncio.run(run())


def test_a_rehearsal_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before the first refit nor while one is under way."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            commit, gate = scripted.app.commit, scripted.app.gate
            monkeypatch.setattr("refitd.commit.REHEARSE_SECONDS", -1.0)
            assert scripted.app.engine.meanwhile == commit.rehearse
            commit.rehearse()
            session, epoch = await scripted.writer()
            source = await scripted.open(session, epoch)
            command = CommitRefit(epoch=epoch, source=source)
            await scripted.ask(session, command, RefitCommitted)
            held = scripted.llm.hold("refitd_commit")
            second = asyncio.create_task(scripted.ask(session, command, RefitCommitted))
            await held.begun.wait()
            commit.rehearse()
            assert (gate.state, gate.version) == (EngineState.REFITTING, 1)
            assert [report.version for report in commit.reports] == [1]
            held.may_end.set()
            assert (await second).report.version == 2
            assert [report.version for report in commit.reports] == [2, 1]

    asyncio.run(run())


def test_a_release_that_one_worker_cannot_see_is_refused_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that can would write, and the weights be torn. The gate stays open: no running request pays for it."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            session, epoch = await scripted.writer()
            opened = [{"ok": True, **OPENED, "release": sees} for sees in (True, False)]
            scripted.llm.failures["refitd_open_source"] = opened
            source = await scripted.open(session, epoch)
            scripted.app.gate.on_change = lambda _state: pytest.fail("the gate has moved")
            with pytest.raises(ProtocolError) as refused:
                await scripted.ask(session, CommitRefit(epoch=epoch, source=source, release=2), RefitCommitted)
            assert refused.value.code is ErrorCode.UNSUPPORTED
            assert "refitd_commit" not in scripted.llm.calls

    asyncio.run(run())


def test_workers_that_wait_for_a_release_do_not_pass_for_an_engine_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the deadline is for all else."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch, refit={"deadline_seconds": 5.0}) as scripted:
            session, epoch = await scripted.writer()
            scripted.llm.failures["refitd_open_source"] = {"ok": True, **OPENED, "release": True}
            source = await scripted.open(session, epoch)
            held = scripted.llm.hold("refitd_commit")
            command = CommitRefit(epoch=epoch, source=source, release=2)
            committing = asyncio.create_task(scripted.ask(session, command, RefitCommitted))
            await held.begun.wait()
            (waiting,) = scripted.app.engine._waiting
            ends = waiting.when()
            assert ends is not None
            assert ends > asyncio.get_running_loop().time() + RELEASE_SECONDS
            held.may_end.set()
            await committing

    asyncio.run(run())
