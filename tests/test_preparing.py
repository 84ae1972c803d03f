"""The daemon's side of a prepared refit: its patience, what a bell is rung for, and workers that refuse. No vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from refit_protocol.bell import MAX_BELL_WORKERS
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    AbortRefit,
    CommitRefit,
    FinishRefit,
    PrepareRefit,
    RefitAborted,
    RefitCommitted,
    RefitHeld,
    RefitPrepared,
)
from refit_protocol.states import EngineState
from refitd.gate import Gate
from refitd.sessions import Session
from tests import scripted_app
from tests.scripted_app import ScriptedApp, loaded_app, worker_refusal

# Of the loop: more than anything takes that waits for nothing.
TURNS = 50
SOON = 0.001


class Trainer:
    """The writer, with a source."""

    def __init__(self, scripted: ScriptedApp, session: Session, epoch: int, source: int) -> None:
        self.scripted, self.llm, self.gate = scripted, scripted.llm, scripted.app.gate
        self._session, self._epoch, self._source = session, epoch, source

    async def prepare(self, **options: Any) -> RefitPrepared:
        command = PrepareRefit(epoch=self._epoch, source=self._source, **options)
        return await self.scripted.ask(self._session, command, RefitPrepared)

    async def commit(self) -> RefitCommitted:
        command = CommitRefit(epoch=self._epoch, source=self._source)
        return await self.scripted.ask(self._session, command, RefitCommitted)

    async def finish(self, refit: int) -> RefitCommitted:
        return await self.scripted.ask(self._session, FinishRefit(epoch=self._epoch, refit=refit), RefitCommitted)

    async def hold(self, refit: int) -> RefitHeld:
        command = FinishRefit(epoch=self._epoch, refit=refit, hold=True)
        return await self.scripted.ask(self._session, command, RefitHeld)

    async def abort(self, refit: int) -> RefitAborted:
        return await self.scripted.ask(self._session, AbortRefit(epoch=self._epoch, refit=refit), RefitAborted)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test's own coroutine beside a daemon that keeps no weights."""

    def run(work: Callable[[Trainer], Coroutine[Any, Any, None]], **settings: Any) -> None:
        async def beside() -> None:
            async with loaded_app(tmp_path, monkeypatch, **settings) as scripted:
                session, epoch = await scripted.writer()
                await work(Trainer(scripted, session, epoch, await scripted.open(session, epoch)))

        asyncio.run(beside())

    return run


def ready_again(gate: Gate) -> asyncio.Event:
    """Set when its state becomes that."""
    ready = asyncio.Event()
    gate.on_change = lambda state: ready.set() if state is EngineState.READY else None
    return ready


def test_the_configuration_says_how_long_is_waited(run: Callable[..., None]) -> None:
    async def work(trainer: Trainer) -> None:
        ready = ready_again(trainer.gate)
        await trainer.prepare()
        await ready.wait()
        assert "refitd_commit" not in trainer.llm.calls

    run(work, refit={"hold_seconds": SOON})


def test_a_finish_that_has_begun_is_not_too_late(run: Callable[..., None]) -> None:
    """`hold_seconds` bounds the wait for it, neither the copy nor what is held afterwards."""

    async def work(trainer: Trainer) -> None:
        refit = (await trainer.prepare(hold_seconds=5.0)).refit
        window = trainer.scripted.app.refit._window
        copying = trainer.llm.hold("refitd_commit")
        holding = asyncio.create_task(trainer.hold(refit))
        await copying.begun.wait()
        assert window.refit is not None
        assert window.refit.patience_seconds > 5.0
        trainer.llm.release()
        await holding
        assert trainer.gate.state is EngineState.REFITTING
        assert window.refit.patience_seconds > 5.0
        assert (await trainer.finish(refit)).report.version == 1
        await asyncio.sleep(0)
        assert not trainer.scripted.app.refit._running.tasks

    run(work)


def test_the_end_of_the_wait_and_a_finish_that_comes_with_it(run: Callable[..., None]) -> None:
    """The abort is first: what finishes behind it finds nothing, and nothing is written."""

    async def work(trainer: Trainer) -> None:
        aborting = trainer.llm.hold("refitd_abort")
        refit = (await trainer.prepare(hold_seconds=SOON)).refit
        await aborting.begun.wait()
        finishing = asyncio.create_task(trainer.finish(refit))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert not finishing.done()
        trainer.llm.release()
        with pytest.raises(ProtocolError) as late:
            await finishing
        assert late.value.code is ErrorCode.UNKNOWN_REFIT
        assert trainer.gate.state is EngineState.READY
        assert "refitd_commit" not in trainer.llm.calls

    run(work)


def test_an_abort_that_is_meant_is_no_failure(run: Callable[..., None]) -> None:
    """Neither in the status nor in the figures; what ends by itself is one."""

    async def work(trainer: Trainer) -> None:
        failed: list[ProtocolError] = []
        trainer.scripted.app.commit.on_failed = failed.append
        assert (await trainer.abort((await trainer.prepare()).refit)).state is EngineState.READY
        assert trainer.gate.last_error is None
        assert not failed
        ready = ready_again(trainer.gate)
        await trainer.prepare(hold_seconds=SOON)
        await ready.wait()
        assert trainer.gate.last_error is not None
        assert failed

    run(work)


def test_an_abort_after_the_first_write_is_a_failure(run: Callable[..., None]) -> None:
    """The weights are torn by it, and the status says why."""

    async def work(trainer: Trainer) -> None:
        trainer.llm.failures["refitd_abort"] = {"ok": True, "wrote": True}
        assert (await trainer.abort((await trainer.prepare()).refit)).state is EngineState.TORN
        assert trainer.gate.last_error is not None
        assert "the trainer aborted" in trainer.gate.last_error.message

    run(work)


def test_an_abort_that_comes_during_the_copy_comes_too_late(run: Callable[..., None]) -> None:
    async def work(trainer: Trainer) -> None:
        refit = (await trainer.prepare()).refit
        copying = trainer.llm.hold("refitd_commit")
        finishing = asyncio.create_task(trainer.finish(refit))
        await copying.begun.wait()
        aborting = asyncio.create_task(trainer.abort(refit))
        await asyncio.sleep(0)
        trainer.llm.release()
        assert (await finishing).report.version == 1
        with pytest.raises(ProtocolError) as late:
            await aborting
        assert late.value.code is ErrorCode.UNKNOWN_REFIT

    run(work)


def test_what_one_worker_refuses_waits_on_none(run: Callable[..., None]) -> None:
    """On the others copies may be waiting, which have to end before the engine goes on."""

    async def work(trainer: Trainer) -> None:
        trainer.gate.enter()
        trainer.llm.failures["refitd_prepare"] = worker_refusal(ErrorCode.MANIFEST_MISMATCH)
        with pytest.raises(ProtocolError) as refused:
            await trainer.prepare()
        assert refused.value.code is ErrorCode.MANIFEST_MISMATCH
        assert trainer.gate.state is EngineState.READY
        await asyncio.sleep(0)
        calls = trainer.llm.calls
        assert calls.index("refitd_prepare") < calls.index("refitd_abort") < calls.index("thaw")

    run(work)


def test_what_was_rung_before_the_abort_has_written(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is torn; a part cannot be prepared then, and all of it can, which mends it."""

    async def work(trainer: Trainer) -> None:
        refit = (await trainer.prepare()).refit
        monkeypatch.setattr(scripted_app, "ANSWERS", {**scripted_app.ANSWERS, "refitd_abort": {"wrote": True}})
        assert (await trainer.abort(refit)).state is EngineState.TORN
        with pytest.raises(ProtocolError) as refused:
            await trainer.prepare(only=["a"])
        assert refused.value.code is ErrorCode.TORN
        refit = (await trainer.prepare()).refit
        assert trainer.gate.state is EngineState.REFITTING
        assert (await trainer.finish(refit)).report.version == 1
        assert trainer.gate.state is EngineState.READY

    run(work)


@pytest.mark.parametrize(("rung", "state"), [(True, EngineState.TORN), (False, EngineState.READY)])
def test_a_finish_that_is_refused_asks_whether_the_copies_have_run(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, rung: bool, state: EngineState
) -> None:
    """Its time is over just as it comes, or its worker refuses: what was rung for before is written all the same."""

    async def work(trainer: Trainer) -> None:
        refit = (await trainer.prepare()).refit
        monkeypatch.setattr(scripted_app, "ANSWERS", {**scripted_app.ANSWERS, "refitd_abort": {"wrote": rung}})
        window = trainer.scripted.app.refit._window
        assert window.refit is not None
        window.refit.ticket.withdraw("its trainer has gone")
        with pytest.raises(ProtocolError) as refused:
            await trainer.finish(refit)
        assert refused.value.code is ErrorCode.REFIT_FAILED
        assert trainer.gate.state is state
        assert "refitd_commit" not in trainer.llm.calls

    run(work)


def test_what_is_prepared_on_torn_weights_and_aborted_leaves_them_torn(run: Callable[..., None]) -> None:
    async def work(trainer: Trainer) -> None:
        trainer.llm.failures["refitd_commit"] = worker_refusal(ErrorCode.ATTEST_FAILED, wrote=True)
        with pytest.raises(ProtocolError):
            await trainer.commit()
        assert trainer.gate.state is EngineState.TORN
        refit = (await trainer.prepare()).refit
        assert (await trainer.abort(refit)).state is EngineState.TORN

    run(work)


@pytest.mark.parametrize("waiting", [True, False])
def test_a_bell_is_rung_for_where_anything_waits(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, waiting: bool
) -> None:
    """Each refit has a number of its own, and a trainer never rings where a bell has no words for all workers."""

    async def work(trainer: Trainer) -> None:
        answers = {**scripted_app.ANSWERS, "refitd_prepare": {"waiting": waiting}}
        monkeypatch.setattr(scripted_app, "ANSWERS", answers)
        prepared = await trainer.prepare()
        assert (prepared.ring, prepared.workers) == (prepared.refit if waiting else None, 1)
        await trainer.abort(prepared.refit)
        next_one = await trainer.prepare()
        assert next_one.ring != prepared.ring or not waiting
        await trainer.abort(next_one.refit)
        one_worker = trainer.llm.call_workers

        async def many(method: str, arguments: tuple[Any, ...]) -> list[dict[str, Any]]:
            return await one_worker(method, arguments) * (MAX_BELL_WORKERS + 1)

        monkeypatch.setattr(trainer.llm, "call_workers", many)
        again = await trainer.prepare()
        assert (again.ring, again.workers) == (None, MAX_BELL_WORKERS + 1)

    run(work)
