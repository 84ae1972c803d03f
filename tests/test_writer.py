"""How the writer's role passes on while letting go takes its time. No vLLM."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    AbortRefit,
    AcquireWriter,
    BeginRefit,
    FinishRefit,
    PrepareRefit,
    RefitAborted,
    RefitBegan,
    RefitCommitted,
    RefitPrepared,
    ReleaseWriter,
    ReloadWeights,
    RestoreWeights,
    WeightsRestored,
    WriterAcquired,
    WriterReleased,
)
from refit_protocol.states import EngineEvent, EngineState
from refitd import refit as refit_module
from refitd.config import Config
from refitd.sessions import SessionState
from refitd.worker_error import WorkerError
from tests.scripted_app import ScriptedApp, loaded_app

# Of the loop: more than anything takes that waits for nothing.
TURNS = 50
BOUND_SECONDS = 30.0


def test_letting_go_is_done_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the request is cancelled in the middle: the role is free, and nothing is open."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            session, epoch = await scripted.writer()
            for _ in range(2):
                await scripted.open(session, epoch)
            closing = scripted.llm.hold("refitd_close_source")
            releasing = asyncio.create_task(scripted.ask(session, ReleaseWriter(), WriterReleased))
            await closing.begun.wait()
            releasing.cancel()
            await asyncio.wait({releasing})
            scripted.llm.release()
            await scripted.app.refit.settle()
            assert scripted.app.refit.sources == 0
            assert scripted.app.refit.writer.session is None

    asyncio.run(run())


def test_a_takeover_ends_the_writer_of_that_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another may become the writer as soon as the one before was let go: its memory is unmapped too."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            gone, epoch = await scripted.writer()
            await scripted.open(gone, epoch)
            gone.state = SessionState.CLOSED
            closing = scripted.llm.hold("refitd_close_source")
            taking_over = AcquireWriter(takeover=True)
            last = scripted.session()
            acquiring = asyncio.create_task(scripted.ask(last, taking_over, WriterAcquired))
            await closing.begun.wait()
            later = asyncio.create_task(scripted.ask(scripted.session(), taking_over, WriterAcquired))
            scripted.llm.release()
            epoch = (await acquiring).epoch
            opening = asyncio.create_task(scripted.open(last, epoch))
            assert (await later).epoch > epoch
            await asyncio.gather(opening, return_exceptions=True)
            assert scripted.app.refit.writer.session is not last
            assert scripted.app.refit.sources == 0

    asyncio.run(run())


def test_a_takeover_waits_for_the_end_of_what_is_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's last broadcasts take long to end: the next writer comes when the gate is open again."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            session, epoch = await scripted.writer()
            source = await scripted.open(session, epoch, "bucket")
            began = await scripted.ask(session, BeginRefit(epoch=epoch, source=source), RefitBegan)
            open_refit = scripted.app.refit._window.refit
            assert open_refit is not None
            open_refit.reception = "under way"
            closing = scripted.llm.hold("refitd_close_source")
            aborting = asyncio.create_task(
                scripted.ask(session, AbortRefit(epoch=epoch, refit=began.refit), RefitAborted)
            )
            await closing.begun.wait()
            last = scripted.session()
            acquiring = asyncio.create_task(scripted.ask(last, AcquireWriter(takeover=True), WriterAcquired))
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert not acquiring.done()
            scripted.llm.release()
            acquired = await acquiring
            assert scripted.app.gate.state is EngineState.READY
            await scripted.open(last, acquired.epoch)
            await aborting

    asyncio.run(run())


def test_a_reload_that_is_given_up_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the disk is slow to say what lies there, and the role passes on meanwhile."""
    looking, may_look, looked = (threading.Event() for _ in range(3))

    def look(_path: str | None, _config: Config) -> Path:
        looking.set()
        may_look.wait()
        looked.set()
        return tmp_path

    async def give_up(scripted: ScriptedApp) -> None:
        session, epoch = await scripted.writer()
        reloading = asyncio.create_task(scripted.ask(session, ReloadWeights(epoch=epoch), RefitCommitted))
        await asyncio.to_thread(looking.wait)
        await scripted.ask(session, ReleaseWriter(), WriterReleased)
        with pytest.raises(WorkerError, match="aborted: writer released"):
            async with asyncio.timeout(BOUND_SECONDS):
                await reloading
        await scripted.open(session, (await scripted.ask(session, AcquireWriter(), WriterAcquired)).epoch)

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            monkeypatch.setattr(refit_module, "checkpoint_directory", look)
            try:
                await give_up(scripted)
            finally:
                may_look.set()
            await asyncio.to_thread(looked.wait)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert not {"refitd_check_checkpoint", "refitd_reload"} & {method for method, _ in scripted.llm.asked}

    asyncio.run(run())


def test_a_writer_lets_go_when_what_it_has_restored_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one finds no restore under way, though whoever asked for this one is gone."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch, refit={"keep_last": "host"}) as scripted:
            session, epoch = await scripted.writer()
            scripted.app.gate.step(EngineEvent.REFIT_STARTED)
            scripted.app.gate.step(EngineEvent.REFIT_TORN)
            restoring = scripted.llm.hold("refitd_restore")
            asked = asyncio.create_task(scripted.ask(session, RestoreWeights(epoch=epoch), WeightsRestored))
            await restoring.begun.wait()
            asked.cancel()
            releasing = asyncio.create_task(scripted.ask(session, ReleaseWriter(), WriterReleased))
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert not releasing.done()
            scripted.llm.release()
            await releasing
            assert scripted.app.gate.state is EngineState.READY

    asyncio.run(run())


def test_who_is_the_writer_no_more_is_told_who_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what became of its refit, and how to go on."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            session, epoch = await scripted.writer()
            source = await scripted.open(session, epoch)
            began = await scripted.ask(session, PrepareRefit(epoch=epoch, source=source), RefitPrepared)
            other = scripted.session()
            await scripted.ask(other, AcquireWriter(takeover=True), WriterAcquired)
            finish = FinishRefit(epoch=epoch, refit=began.refit)
            said = (
                r"'test' \(pid 2\) is the writer now.*was aborted\. Refit again when.*acquire_writer\(takeover=True\)"
            )
            with pytest.raises(ProtocolError, match=said) as refused:
                await scripted.ask(session, finish, RefitCommitted)
            assert refused.value.code is ErrorCode.STALE_EPOCH
            await scripted.ask(other, ReleaseWriter(), WriterReleased)
            with pytest.raises(ProtocolError, match=r"role was given up.*acquire the role"):
                await scripted.ask(session, finish, RefitCommitted)
            epoch = (await scripted.ask(session, AcquireWriter(), WriterAcquired)).epoch
            with pytest.raises(ProtocolError, match=rf"epoch 1 is not the present writer's \({epoch}\)"):
                await scripted.ask(session, FinishRefit(epoch=1, refit=began.refit), RefitCommitted)

    asyncio.run(run())
