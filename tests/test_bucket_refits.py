"""Buckets that are sent without waiting for answers: what the workers are asked, and when. No vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    AbortRefit,
    ApplyBucket,
    BeginRefit,
    BucketApplied,
    FinishRefit,
    OpenSource,
    RefitAborted,
    RefitBegan,
    RefitCommitted,
    RefitHeld,
    ReleaseWriter,
    SourceOpened,
    WriterReleased,
)
from refit_protocol.states import EngineState
from refit_protocol.tensors import BucketPiece, DType, MemfdSegment, TensorShape
from refitd.sessions import Session
from tests.scripted_app import ScriptedApp, loaded_app, worker_refusal

TENSOR = TensorShape(name="a", dtype=DType.INT8, shape=(4,))
PIECE = BucketPiece(name="a", first=0, count=4, offset_bytes=0)


# Of the loop: more than anything takes that waits for nothing.
TURNS = 50


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Trainer:
    """The writer, with a bucket source from which a refit was made."""

    def __init__(self, scripted: ScriptedApp, session: Session, epoch: int, source: int) -> None:
        self.scripted, self.llm, self.gate = scripted, scripted.llm, scripted.app.gate
        self._session, self._epoch, self._source = session, epoch, source

    async def begin(self, *, again: bool = True) -> RefitBegan:
        command = BeginRefit(epoch=self._epoch, source=self._source, tensors=[] if again else [TENSOR], again=again)
        return await self.scripted.ask(self._session, command, RefitBegan)

    async def apply(self, refit: int | None = None, *, again: bool = True, layout: int = 0) -> BucketApplied:
        pieces = [] if again else [PIECE]
        command = ApplyBucket(epoch=self._epoch, refit=refit, bucket=0, pieces=pieces, layout=layout)
        return await self.scripted.ask(self._session, command, BucketApplied)

    async def finish(self, refit: int) -> RefitCommitted:
        return await self.scripted.ask(self._session, FinishRefit(epoch=self._epoch, refit=refit), RefitCommitted)

    async def hold(self, refit: int) -> RefitHeld:
        command = FinishRefit(epoch=self._epoch, refit=refit, hold=True)
        return await self.scripted.ask(self._session, command, RefitHeld)

    async def release(self) -> WriterReleased:
        return await self.scripted.ask(self._session, ReleaseWriter(), WriterReleased)

    async def abort(self, refit: int) -> RefitAborted:
        return await self.scripted.ask(self._session, AbortRefit(epoch=self._epoch, refit=refit), RefitAborted)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test's own coroutine beside a daemon that keeps no weights."""

    def run(work: Callable[[Trainer], Coroutine[Any, Any, None]]) -> None:
        async def beside() -> None:
            async with loaded_app(tmp_path, monkeypatch, refit={"keep_last": "none"}) as scripted:
                session, epoch = await scripted.writer()
                segment = MemfdSegment(pid=1, fd=3, inode=1, size_bytes=64)
                command = OpenSource(epoch=epoch, kind="bucket", segments=[segment], tensors=[])
                opened = await scripted.ask(session, command, SourceOpened)
                trainer = Trainer(scripted, session, epoch, opened.source)
                began = await trainer.begin(again=False)
                await trainer.apply(again=False)
                await trainer.finish(began.refit)
                scripted.llm.calls.clear()
                scripted.llm.asked.clear()
                try:
                    await work(trainer)
                finally:
                    scripted.llm.release()

        asyncio.run(beside())

    return run


def test_buckets_go_to_the_workers_behind_the_begin(run: Callable[..., None]) -> None:
    """Before its answer, where the last refit from the source was the same."""

    async def work(trainer: Trainer) -> None:
        begin, apply = trainer.llm.hold("refitd_begin"), trainer.llm.hold("refitd_apply_bucket")
        began, applied = asyncio.create_task(trainer.begin()), asyncio.create_task(trainer.apply())
        await apply.begun.wait()
        assert not began.done()
        assert [call for call in trainer.llm.calls if "refit" in call] == ["refitd_begin", "refitd_apply_bucket"]
        begin.may_end.set()
        apply.may_end.set()
        assert (await applied).refit == (await began).refit

    run(work)


def test_buckets_behind_other_tensors_wait_for_the_begin(run: Callable[..., None]) -> None:
    """What they hold is not known before the workers have taken what was announced."""

    async def work(trainer: Trainer) -> None:
        begin = trainer.llm.hold("refitd_begin")
        began = asyncio.create_task(trainer.begin(again=False))
        applied = asyncio.create_task(trainer.apply(again=False))
        await begin.begun.wait()
        await turns()
        assert "refitd_apply_bucket" not in trainer.llm.calls
        begin.may_end.set()
        assert (await applied).refit == (await began).refit

    run(work)


def test_buckets_behind_a_begin_that_the_workers_refuse_are_refused(run: Callable[..., None]) -> None:
    """Though they were sent to the workers, who have written nothing: what was served is served on."""

    async def work(trainer: Trainer) -> None:
        apply = trainer.llm.hold("refitd_apply_bucket")
        trainer.llm.failures["refitd_begin"] = worker_refusal(ErrorCode.MANIFEST_MISMATCH)
        trainer.llm.failures["refitd_apply_bucket"] = worker_refusal(ErrorCode.UNKNOWN_REFIT)
        began, applied = asyncio.create_task(trainer.begin()), asyncio.create_task(trainer.apply())
        await asyncio.wait([began])
        apply.may_end.set()
        await asyncio.wait([applied])
        codes = [task.exception().code for task in (began, applied)]  # type: ignore[union-attr]
        assert codes == [ErrorCode.MANIFEST_MISMATCH, ErrorCode.UNKNOWN_REFIT]
        assert trainer.gate.state is EngineState.READY
        with pytest.raises(ProtocolError) as refused:
            await trainer.apply()
        assert refused.value.code is ErrorCode.UNKNOWN_REFIT

    run(work)


def test_what_one_worker_wrote_behind_a_begin_that_another_refuses_is_not_served(run: Callable[..., None]) -> None:
    """The refusal says that nothing was written, but the buckets were sent behind it."""

    async def work(trainer: Trainer) -> None:
        begin, apply = trainer.llm.hold("refitd_begin"), trainer.llm.hold("refitd_apply_bucket")
        trainer.llm.failures["refitd_begin"] = [{"ok": True}, worker_refusal(ErrorCode.MANIFEST_MISMATCH)]
        trainer.llm.failures["refitd_apply_bucket"] = [
            {"ok": True, "bytes": 4},
            worker_refusal(ErrorCode.UNKNOWN_REFIT),
        ]
        trainer.llm.failures["refitd_abort"] = [{"ok": True, "wrote": True}, {"ok": True, "wrote": False}]
        tasks = [asyncio.create_task(trainer.begin()), asyncio.create_task(trainer.apply())]
        await apply.begun.wait()
        begin.may_end.set()
        await asyncio.wait(tasks[:1])
        apply.may_end.set()
        await asyncio.wait(tasks)
        codes = [task.exception().code for task in tasks]  # type: ignore[union-attr]
        assert codes == [ErrorCode.MANIFEST_MISMATCH, ErrorCode.UNKNOWN_REFIT]
        assert trainer.gate.state is EngineState.TORN

    run(work)


def test_nothing_goes_to_the_workers_behind_a_begin_that_was_refused(run: Callable[..., None]) -> None:
    """While they are asked what was written: else a worker that cannot say might still write it."""

    async def work(trainer: Trainer) -> None:
        abort = trainer.llm.hold("refitd_abort")
        trainer.llm.failures["refitd_begin"] = [{"ok": True}, worker_refusal(ErrorCode.INTERNAL)]
        trainer.llm.failures["refitd_abort"] = worker_refusal(ErrorCode.INTERNAL)
        began = asyncio.create_task(trainer.begin())
        await abort.begun.wait()
        applied = asyncio.create_task(trainer.apply())
        await turns()
        abort.may_end.set()
        await asyncio.wait([began, applied])
        codes = [task.exception().code for task in (began, applied)]  # type: ignore[union-attr]
        assert codes == [ErrorCode.INTERNAL, ErrorCode.UNKNOWN_REFIT]
        assert "refitd_apply_bucket" not in trainer.llm.calls
        assert trainer.gate.state is EngineState.READY

    run(work)


def test_a_begin_of_somebody_else_does_not_come_between(run: Callable[..., None]) -> None:
    """It is refused, and the writer's buckets are for the writer's refit still."""

    async def work(trainer: Trainer) -> None:
        began = await trainer.begin()
        with pytest.raises(ProtocolError) as refused:
            await Trainer(trainer.scripted, trainer.scripted.session(), 1, 1).begin()
        assert refused.value.code is ErrorCode.STALE_EPOCH
        assert (await trainer.apply()).refit == began.refit

    run(work)


def test_buckets_that_waited_for_the_begin_go_before_those_that_come_later(run: Callable[..., None]) -> None:
    """Also before one that comes at the moment at which the refit gets its number."""

    async def work(trainer: Trainer) -> None:
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(trainer.begin())]
        for number in range(TURNS):
            tasks.append(asyncio.create_task(trainer.apply(again=False, layout=number)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        layouts = [layout for method, (*_, layout) in trainer.llm.asked if method == "refitd_apply_bucket"]
        assert layouts == [*range(TURNS)]

    run(work)


def test_the_end_goes_to_the_workers_behind_the_last_bucket(run: Callable[..., None]) -> None:
    """Before its answer; nothing is published before every bucket has been answered."""

    async def work(trainer: Trainer) -> None:
        began = await trainer.begin()
        apply, finish = trainer.llm.hold("refitd_apply_bucket"), trainer.llm.hold("refitd_finish")
        applied = asyncio.create_task(trainer.apply(began.refit))
        committed = asyncio.create_task(trainer.finish(began.refit))
        await finish.begun.wait()
        finish.may_end.set()
        await turns()
        assert not committed.done()
        assert trainer.gate.state is EngineState.REFITTING
        apply.may_end.set()
        assert (await applied).refit == began.refit
        assert (await committed).report.version == trainer.gate.version == 2

    run(work)


def test_the_role_is_given_up_before_anybody_is_told(run: Callable[..., None]) -> None:
    """Also who asks for it a second time: else the role that comes next would be what is given up."""

    async def work(trainer: Trainer) -> None:
        close = trainer.llm.hold("refitd_close_source")
        first = asyncio.create_task(trainer.release())
        await close.begun.wait()
        second = asyncio.create_task(trainer.release())
        await turns()
        assert not second.done()
        close.may_end.set()
        await asyncio.gather(first, second)

    run(work)


def test_a_bucket_that_fails_has_the_last_word(run: Callable[..., None]) -> None:
    """Also where the end was asked for behind it, and some worker has made an end of it."""

    async def work(trainer: Trainer) -> None:
        began = await trainer.begin()
        apply, finish = trainer.llm.hold("refitd_apply_bucket"), trainer.llm.hold("refitd_finish")
        trainer.llm.failures["refitd_apply_bucket"] = worker_refusal(ErrorCode.INVALID_DESCRIPTOR, wrote=True)
        applied = asyncio.create_task(trainer.apply(began.refit))
        committed = asyncio.create_task(trainer.finish(began.refit))
        await finish.begun.wait()
        finish.may_end.set()
        apply.may_end.set()
        await asyncio.wait([applied, committed])
        codes = [task.exception().code for task in (applied, committed)]  # type: ignore[union-attr]
        assert codes == [ErrorCode.INVALID_DESCRIPTOR, ErrorCode.UNKNOWN_REFIT]
        assert trainer.gate.state is EngineState.TORN
        assert trainer.gate.version == 1

    run(work)


@pytest.mark.parametrize("held", [False, True])
def test_an_abort_that_a_worker_refuses_opens_no_gate_over_what_was_written(
    run: Callable[..., None], held: bool
) -> None:
    """By the other worker, or by both: to the workers a held refit is finished, and they say that nothing was."""

    async def work(trainer: Trainer) -> None:
        began = await trainer.begin()
        await trainer.apply(began.refit)
        if held:
            await trainer.hold(began.refit)
        refusal = worker_refusal(ErrorCode.INTERNAL)
        trainer.llm.failures["refitd_abort"] = [refusal if held else {"ok": True, "wrote": True}, refusal]
        assert (await trainer.abort(began.refit)).state is EngineState.TORN

    run(work)


def test_a_number_whose_new_pieces_came_to_grief_stands_for_nothing(run: Callable[..., None]) -> None:
    """The workers may have taken it for those already, and whoever sent them does not know."""

    async def work(trainer: Trainer) -> None:
        began = await trainer.begin()
        trainer.llm.failures["refitd_apply_bucket"] = worker_refusal(ErrorCode.INVALID_DESCRIPTOR)
        with pytest.raises(ProtocolError):
            await trainer.apply(began.refit, again=False)
        del trainer.llm.failures["refitd_apply_bucket"]
        await trainer.begin()
        with pytest.raises(ProtocolError, match="layout 0 is none of bucket 0"):
            await trainer.apply()
        assert (await trainer.apply(again=False)).bucket == 0

    run(work)


def test_an_engine_that_has_just_stopped_is_brought_to_rest_first(run: Callable[..., None]) -> None:
    """After the last request's end: what a refit asks of the workers then takes the short way, which is there while the
    engine stands still."""

    async def work(trainer: Trainer) -> None:
        engine = trainer.scripted.app.engine
        trainer.llm.requests_added += 1
        assert not engine.is_still
        began = await trainer.begin()
        assert engine.is_still
        await trainer.apply(began.refit)
        await trainer.finish(began.refit)
        assert trainer.llm.calls[:2] == ["is_sleeping", "refitd_begin"]
        trainer.llm.calls.clear()
        await trainer.begin()
        assert trainer.llm.calls[0] == "refitd_begin"

    run(work)
