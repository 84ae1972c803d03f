"""A refit that stands by: when it may, whom it gives way to, and what becomes of one that was rung for. No vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest

from refit_protocol.bell import BELL_BYTES, RELEASE_SECONDS
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    BeginRefit,
    CloseSource,
    CommitRefit,
    GetDigest,
    OpenSource,
    RefitBegan,
    RefitCommitted,
    RefitHeld,
    ReleaseWriter,
    Sleep,
    SleepStateChanged,
    SourceClosed,
    SourceOpened,
    WeightsDigest,
    WriterReleased,
)
from refit_protocol.states import EngineState
from refit_protocol.tensors import MemfdSegment
from refitd import standing as standing_module
from refitd.sessions import Session
from refitd.standing import StandBy, Standing
from tests.scripted_app import Held, ScriptedApp, loaded_app, worker_refusal

RUNG = {"ok": True, "wrote": True}
GAVE_WAY = {"ok": True, "wrote": False}
QUIET_SECONDS = 0.002

Start: TypeAlias = Callable[..., Any]


class WatchedLock(asyncio.Lock):
    """Counts who has come to it and found it taken."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting = asyncio.Semaphore(0)

    async def acquire(self) -> Literal[True]:
        if self.locked():
            self._waiting.release()
        return await super().acquire()

    async def until_one_more_waits(self) -> None:
        async with asyncio.timeout(30):
            await self._waiting.acquire()


@dataclass
class Trainer:
    """A writer whose refits stand by."""

    scripted: ScriptedApp
    session: Session
    epoch: int
    source: int

    @property
    def standing(self) -> StandBy:
        return self.scripted.app.refit._standing

    @property
    def calls(self) -> list[str]:
        return [method for method, _ in self.scripted.llm.asked]

    @property
    def state(self) -> EngineState:
        return self.scripted.app.gate.state

    def rings(self) -> None:
        """As the workers find out when somebody comes."""
        self.scripted.llm.failures["refitd_give_way"] = RUNG

    async def commit(self, **terms: Any) -> RefitCommitted:
        command = CommitRefit(epoch=self.epoch, source=self.source, **terms)
        return await self.scripted.ask(self.session, command, RefitCommitted)

    async def until(self, state: Standing) -> None:
        async with asyncio.timeout(30):
            while self.standing.state is not state:
                await self.standing._changed.wait()

    async def has_looked(self) -> None:
        """Whether the engine is quiet, twice: once may have begun before whatever the test has done."""
        look, looks = self.standing._is_quiet, asyncio.Semaphore(0)

        async def counted() -> bool:
            quiet = await look()
            looks.release()
            return quiet

        self.standing._is_quiet = counted  # type: ignore[method-assign]
        try:
            async with asyncio.timeout(30):
                for _ in range(2):
                    await looks.acquire()
        finally:
            self.standing._is_quiet = look  # type: ignore[method-assign]

    async def has_waited(self) -> None:
        """Somebody, for the commit that was rung for, and has found its time over: now it waits for one that has
        come."""
        wait, waits = self.standing._until_down, asyncio.Semaphore(0)

        async def counted() -> None:
            waits.release()
            await wait()

        self.standing._until_down = counted  # type: ignore[method-assign]
        try:
            async with asyncio.timeout(30):
                for _ in range(2):
                    await waits.acquire()
        finally:
            self.standing._until_down = wait  # type: ignore[method-assign]

    def watched_order(self) -> WatchedLock:
        """In the place of the one that a refit that begins has, and what is cleaned; nobody may hold that now."""
        order = self.scripted.app.commit.cleaning.order = WatchedLock()
        return order

    async def look(self) -> WeightsDigest:
        """As somebody else; it passes the gate like a request."""
        return await self.scripted.ask(self.scripted.session(), GetDigest(), WeightsDigest)


async def opened(scripted: ScriptedApp, *, stand_by: bool = True) -> Trainer:
    session, epoch = await scripted.writer()
    assert session.pid is not None
    bell = MemfdSegment(pid=session.pid, fd=3, inode=1, size_bytes=BELL_BYTES)
    command = OpenSource(epoch=epoch, kind="inplace", segments=[], tensors=[], bell=bell, stand_by=stand_by)
    return Trainer(scripted, session, epoch, (await scripted.ask(session, command, SourceOpened)).source)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A daemon for which a refit stands by, after the first one."""
    monkeypatch.setattr(standing_module, "QUIET_SECONDS", QUIET_SECONDS)

    @asynccontextmanager
    async def started(**settings: Any) -> AsyncIterator[Trainer]:
        async with loaded_app(tmp_path, monkeypatch, **settings) as scripted:
            trainer = await opened(scripted)
            await trainer.commit()
            await trainer.until(Standing.UP)
            yield trainer

    return started


def test_the_next_commit_takes_up_what_stands_by(start: Start) -> None:
    """Again and again; nobody is asked to give way, and the gate is open until the commit comes."""

    async def run() -> None:
        async with start() as trainer:
            for version in (2, 3):
                assert (trainer.state, trainer.calls[-1]) == (EngineState.READY, "refitd_stand_by")
                report = (await trainer.commit()).report
                assert (report.version, report.stood_by) == (version, True)
                assert (trainer.calls[-1], trainer.standing.is_up) == ("refitd_commit", False)
                await trainer.until(Standing.UP)
                assert trainer.scripted.app.lifecycle.read_status().stands_by
            assert "refitd_give_way" not in trainer.calls

    asyncio.run(run())


def test_each_has_a_number_of_its_own(start: Start) -> None:
    """A late ring for one must not start the next."""

    async def run() -> list[int]:
        async with start() as trainer:
            await trainer.commit()
            await trainer.until(Standing.UP)
            return [args[2] for method, args in trainer.scripted.llm.asked if method == "refitd_stand_by"]

    first, second = asyncio.run(run())
    assert 0 < first < second


def test_nothing_stands_by_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            trainer = await opened(scripted, stand_by=False)
            await trainer.commit()
            assert trainer.standing._keeping is None

    asyncio.run(run())


@pytest.mark.parametrize("terms", [{"only": []}, {"check_finite": True}])
def test_a_commit_of_which_more_is_to_be_known_does_not_make_the_next_one_stand_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terms: dict[str, Any]
) -> None:
    """Parts of the weights, or values that have to be looked at first."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            trainer = await opened(scripted)
            await trainer.commit(**terms)
            assert trainer.standing._keeping is None

    asyncio.run(run())


def test_whoever_comes_to_the_gate_is_given_way(start: Start) -> None:
    """Then it stands by again, once they have gone."""

    async def run() -> None:
        async with start() as trainer:
            gate = trainer.scripted.app.gate
            assert await gate.admit() == 1
            gate.enter()
            assert (trainer.standing.state, trainer.calls[-1]) == (Standing.DOWN, "refitd_give_way")
            await trainer.has_looked()
            assert trainer.standing.state is Standing.DOWN
            assert not (await trainer.commit()).report.stood_by
            gate.leave()
            await trainer.until(Standing.UP)

    asyncio.run(run())


def test_many_that_come_at_once_ask_once(start: Start) -> None:
    async def run() -> None:
        async with start() as trainer:
            gate = trainer.scripted.app.gate
            assert await asyncio.gather(*(gate.admit() for _ in range(20))) == [1] * 20
            assert trainer.calls.count("refitd_give_way") == 1

    asyncio.run(run())


def test_whoever_waits_for_the_next_weights_keeps_nothing_from_standing_by(start: Start) -> None:
    """It is what they wait for; the commit lets them pass."""

    async def run() -> None:
        async with start() as trainer:
            gate = trainer.scripted.app.gate
            waiting = [asyncio.create_task(gate.admit(min_version)) for min_version in (2, 3)]
            while gate.awaiting_version < len(waiting):  # noqa: ASYNC110 - a gate that is waited at has no event
                await asyncio.sleep(0)
            assert trainer.standing.state is Standing.UP
            await trainer.commit()
            assert await waiting[0] == 2
            await trainer.until(Standing.UP)
            await trainer.commit()
            assert await waiting[1] == 3
            assert "refitd_give_way" not in trainer.calls
            assert (gate.waiting, gate.awaiting_version) == (0, 0)

    asyncio.run(run())


def test_whoever_comes_while_it_is_made_ready_waits_for_that(start: Start) -> None:
    """A worker does one thing after the other; the engine must not begin a step meanwhile."""

    async def run() -> None:
        async with start() as trainer:
            held = trainer.scripted.llm.hold("refitd_stand_by")
            await trainer.commit()
            await held.begun.wait()
            coming = asyncio.create_task(trainer.scripted.app.gate.admit())
            await asyncio.sleep(0)
            assert not coming.done()
            held.may_end.set()
            assert await coming == 2
            assert trainer.calls[-2:] == ["refitd_stand_by", "refitd_give_way"]

    asyncio.run(run())


def test_a_commit_that_comes_while_it_is_made_ready_takes_it_up(start: Start) -> None:
    """Some workers may have been rung for by then."""

    async def run() -> None:
        async with start() as trainer:
            held = trainer.scripted.llm.hold("refitd_stand_by")
            await trainer.commit()
            await held.begun.wait()
            committing = asyncio.create_task(trainer.commit())
            await asyncio.sleep(0)
            held.may_end.set()
            assert (await committing).report.version == 3
            assert trainer.calls[-1] == "refitd_commit"
            assert "refitd_give_way" not in trainer.calls

    asyncio.run(run())


async def begin_another(trainer: Trainer) -> None:
    session, epoch = trainer.session, trainer.epoch
    source = await trainer.scripted.open(session, epoch, "bucket")
    await trainer.scripted.ask(session, BeginRefit(epoch=epoch, source=source), RefitBegan)


async def fall_asleep(trainer: Trainer) -> None:
    await trainer.scripted.ask(trainer.scripted.session(), Sleep(level=1), SleepStateChanged)


async def look(trainer: Trainer) -> None:
    await trainer.look()


async def close(trainer: Trainer) -> None:
    command = CloseSource(epoch=trainer.epoch, source=trainer.source)
    await trainer.scripted.ask(trainer.session, command, SourceClosed)


async def release(trainer: Trainer) -> None:
    await trainer.scripted.ask(trainer.session, ReleaseWriter(), WriterReleased)


async def commit_a_part(trainer: Trainer) -> None:
    await trainer.commit(only=[])


async def commit_finite(trainer: Trainer) -> None:
    await trainer.commit(check_finite=True)


async def hold(trainer: Trainer) -> None:
    command = CommitRefit(epoch=trainer.epoch, source=trainer.source, hold=True)
    await trainer.scripted.ask(trainer.session, command, RefitHeld)


OTHERS = [begin_another, fall_asleep, look, close, release, commit_a_part, commit_finite, hold]


def test_one_that_rises_just_before_a_refit_gives_way_before_that_has_the_gate(start: Start) -> None:
    """Its own commit, if it is rung for, must find no other refit under way."""

    async def run() -> None:
        async with start() as trainer:
            order = trainer.watched_order()
            async with order:
                await trainer.look()
                await order.until_one_more_waits()
                giving_way = trainer.scripted.llm.hold("refitd_give_way")
                beginning = asyncio.create_task(begin_another(trainer))
                await order.until_one_more_waits()
            await giving_way.begun.wait()
            assert trainer.state is EngineState.READY
            giving_way.may_end.set()
            await beginning

    asyncio.run(run())


def test_it_gives_way_to_a_commit_from_another_source(start: Start) -> None:
    async def run() -> None:
        async with start() as trainer:
            source = await trainer.scripted.open(trainer.session, trainer.epoch)
            await trainer.until(Standing.UP)
            asked = trainer.calls.count("refitd_give_way")
            command = CommitRefit(epoch=trainer.epoch, source=source)
            await trainer.scripted.ask(trainer.session, command, RefitCommitted)
            assert trainer.calls.count("refitd_give_way") == asked + 1

    asyncio.run(run())


@pytest.mark.parametrize("other", OTHERS)
def test_it_gives_way_before_the_workers_do_anything_else(
    start: Start, other: Callable[[Trainer], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        async with start() as trainer:
            before = len(trainer.calls)
            await other(trainer)
            assert trainer.calls[before] == "refitd_give_way"
            assert trainer.state is not EngineState.TORN

    asyncio.run(run())


def test_it_gives_way_to_generations(start: Start) -> None:
    """Which look at the gate by themselves, and do not wait where it is open."""

    async def run() -> None:
        async with start() as trainer:
            gate = trainer.scripted.app.gate
            assert not gate.is_open_to(None)
            await gate.admit()
            assert gate.is_open_to(None)
            assert not gate.is_open_to(2)

    asyncio.run(run())


def test_where_it_was_rung_for_nobody_passes_before_the_commit(start: Start) -> None:
    """What is there are the new weights already: whoever has come is served by them, and by their version."""

    async def run() -> None:
        async with start() as trainer:
            trainer.rings()
            coming = asyncio.create_task(trainer.look())
            await trainer.until(Standing.RUNG)
            assert not coming.done()
            await trainer.commit()
            assert (await coming).version == 2
            assert trainer.state is EngineState.READY

    asyncio.run(run())


def test_nobody_waits_longer_than_at_any_gate(start: Start) -> None:
    """And no more of them; the commit may still come."""

    async def run() -> None:
        async with start(refit={"gate_wait_seconds": 0.02, "max_waiting_requests": 1}) as trainer:
            gate = trainer.scripted.app.gate
            trainer.rings()
            waiting = asyncio.create_task(gate.admit())
            await trainer.until(Standing.RUNG)
            for late, code in ((gate.admit(), ErrorCode.TOO_MANY_REQUESTS), (waiting, ErrorCode.DEADLINE_EXCEEDED)):
                with pytest.raises(ProtocolError) as refused:
                    await late
                assert refused.value.code is code
            await trainer.commit()
            assert await gate.admit() == 2

    asyncio.run(run())


@pytest.mark.parametrize("answers", [[GAVE_WAY, RUNG], [RUNG, GAVE_WAY]])
def test_it_was_rung_for_where_any_worker_has_copied(start: Start, answers: list[dict[str, Any]]) -> None:
    """The trainer rings for one after the other."""

    async def run() -> None:
        async with start() as trainer:
            trainer.scripted.llm.failures["refitd_give_way"] = answers
            coming = asyncio.create_task(trainer.look())
            await trainer.until(Standing.RUNG)
            await trainer.commit()
            assert (await coming).version == 2

    asyncio.run(run())


def test_none_rises_before_the_engine_stands_still(start: Start) -> None:
    """A request that has ended may have left it a step to make."""

    async def run() -> None:
        async with start() as trainer:
            await trainer.look()
            trainer.scripted.llm.requests_added += 1
            await trainer.has_looked()
            assert trainer.standing.state is Standing.DOWN
            trainer.scripted.app.gate.enter()
            trainer.scripted.app.gate.leave()
            await trainer.until(Standing.UP)

    asyncio.run(run())


def test_none_rises_in_an_engine_that_sleeps(start: Start) -> None:
    """It stands still, and its weights are somewhere else."""

    async def run() -> None:
        async with start() as trainer:
            await fall_asleep(trainer)
            await trainer.has_looked()
            assert trainer.standing.state is Standing.DOWN

    asyncio.run(run())


def test_what_was_rung_for_and_not_committed_leaves_the_weights_torn(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer has stopped in between; a full refit mends it."""
    monkeypatch.setattr(standing_module, "RELEASE_SECONDS", 0.01)

    async def run() -> None:
        async with start() as trainer:
            trainer.rings()
            with pytest.raises(ProtocolError) as refused:
                await trainer.look()
            assert refused.value.code is ErrorCode.TORN
            await trainer.commit()
            assert trainer.state is EngineState.READY

    asyncio.run(run())


def test_nobody_waits_longer_for_its_commit_than_for_a_refit(start: Start) -> None:
    """Nor do more: as ever at the gate, whoever comes is bounded by its own time and by the daemon's settings."""

    async def run() -> None:
        async with start(refit={"gate_wait_seconds": 0.05, "max_waiting_requests": 2}) as trainer:
            trainer.rings()
            gate = trainer.scripted.app.gate
            outcomes = await asyncio.gather(
                gate.admit(), gate.admit(wait_seconds=0.01), gate.admit(), return_exceptions=True
            )
            assert [outcome.code for outcome in outcomes if isinstance(outcome, ProtocolError)] == [
                ErrorCode.DEADLINE_EXCEEDED,
                ErrorCode.DEADLINE_EXCEEDED,
                ErrorCode.TOO_MANY_REQUESTS,
            ]
            assert trainer.standing.state is Standing.RUNG
            await trainer.commit()
            assert await gate.admit() == 2

    asyncio.run(run())


def test_it_gives_way_where_nobody_may_wait(start: Start) -> None:
    """At a shut gate, that is: what stands by is to cost nobody a refusal for good."""

    async def run() -> None:
        async with start(refit={"max_waiting_requests": 0}) as trainer:
            assert await trainer.scripted.app.gate.admit() == 1

    asyncio.run(run())


@pytest.mark.parametrize("end", [look, close])
def test_it_is_ended_to_the_end_though_nobody_waits_for_that_any_more(
    start: Start, monkeypatch: pytest.MonkeyPatch, end: Callable[[Trainer], Coroutine[Any, Any, None]]
) -> None:
    """A request that was cancelled, or a session that has gone, must not leave new weights behind that pass for the old
    ones."""
    monkeypatch.setattr(standing_module, "RELEASE_SECONDS", 0.01)

    async def run() -> None:
        async with start() as trainer:
            trainer.rings()
            order = trainer.watched_order()
            async with order:
                ending = asyncio.create_task(end(trainer))
                await trainer.until(Standing.RUNG)
                ending.cancel()
                await asyncio.wait([ending])
                # Cleaning has the engine, and until it is done nobody is let pass to what is there.
                await order.until_one_more_waits()
                assert not trainer.scripted.app.gate.is_open_to(None)
            await asyncio.wait(trainer.scripted.app.refit._running.tasks)
            assert trainer.state is EngineState.TORN

    asyncio.run(run())


@pytest.mark.parametrize("end", [close, release])
@pytest.mark.parametrize(("kept", "state"), [("none", EngineState.TORN), ("host", EngineState.READY)])
def test_what_was_rung_for_is_not_served_once_its_source_is_gone(
    start: Start, end: Callable[[Trainer], Coroutine[Any, Any, None]], kept: str, state: EngineState
) -> None:
    """At once torn, or restored where weights are kept: no commit can come any more."""

    async def run() -> None:
        async with start(refit={"keep_last": kept}) as trainer:
            trainer.scripted.llm.failures["refitd_restore"] = {"ok": True, "digest": "0", "digest_parts": {}}
            trainer.rings()
            await end(trainer)
            assert (trainer.state, trainer.scripted.app.gate.version) == (state, 1)

    asyncio.run(run())


@pytest.mark.parametrize("terms", [{"version": 1}, {"deadline_seconds": -1.0}, {"release": 2}])
def test_a_commit_that_is_refused_takes_what_was_rung_for_along(start: Start, terms: dict[str, Any]) -> None:
    """No worker has been asked, and yet new weights are there. Where nothing was rung for, nothing has changed."""

    async def run() -> None:
        async with start() as trainer:
            for rung, state in ((False, EngineState.READY), (True, EngineState.TORN)):
                if rung:
                    await trainer.until(Standing.UP)
                    trainer.rings()
                with pytest.raises(ProtocolError) as refused:
                    await trainer.commit(**terms)
                assert refused.value.code is not ErrorCode.TORN
                assert trainer.state is state

    asyncio.run(run())


def test_a_commit_that_fails_leaves_nothing_standing_by(start: Start) -> None:
    """The worker ends what it had with its failure, and says whether it wrote."""

    async def run() -> None:
        async with start() as trainer:
            for wrote, state in ((False, EngineState.READY), (True, EngineState.TORN)):
                await trainer.until(Standing.UP)
                trainer.scripted.llm.failures["refitd_commit"] = worker_refusal(ErrorCode.REFIT_FAILED, wrote=wrote)
                with pytest.raises(ProtocolError):
                    await trainer.commit()
                assert (trainer.state, trainer.standing.is_up) == (state, False)

    asyncio.run(run())


def test_a_commit_that_fails_waits_for_none_that_was_rung_for(start: Start) -> None:
    """It is the one: what was kept is put back at once, and once."""

    async def run() -> None:
        async with start(refit={"keep_last": "host"}) as trainer:
            trainer.scripted.llm.failures["refitd_restore"] = {"ok": True, "digest": "0", "digest_parts": {}}
            trainer.scripted.llm.failures["refitd_commit"] = worker_refusal(ErrorCode.REFIT_FAILED, wrote=True)
            trainer.rings()
            coming = asyncio.create_task(trainer.look())
            await trainer.until(Standing.RUNG)
            with pytest.raises(ProtocolError) as refused:
                async with asyncio.timeout(RELEASE_SECONDS / 2):
                    await trainer.commit()
            assert refused.value.code is ErrorCode.REFIT_FAILED
            assert (await coming).version == 1
            assert trainer.calls.count("refitd_restore") == 1

    asyncio.run(run())


async def in_its_window(trainer: Trainer) -> tuple[asyncio.Task[RefitCommitted], Held]:
    """A commit that will be refused before a worker is asked for it, but not before the test lets go."""
    trainer.scripted.llm.requests_added += 1
    settling = trainer.scripted.llm.hold("is_sleeping")
    committing = asyncio.create_task(trainer.commit(deadline_seconds=QUIET_SECONDS))
    await settling.begun.wait()
    await asyncio.sleep(QUIET_SECONDS)
    return committing, settling


def test_a_commit_that_has_come_is_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a deadline of its own; where it is refused after all, new weights are there all the same."""
    monkeypatch.setattr(standing_module, "RELEASE_SECONDS", QUIET_SECONDS)

    async def run() -> None:
        async with start() as trainer:
            trainer.rings()
            committing, settling = await in_its_window(trainer)
            coming = asyncio.create_task(trainer.look())
            await trainer.has_waited()
            settling.may_end.set()
            for each in (committing, coming):
                with pytest.raises(ProtocolError):
                    await each
            assert trainer.state is EngineState.TORN

    asyncio.run(run())


def test_whoever_comes_while_it_is_committed_waits_for_that(start: Start) -> None:
    """What a worker says to them may be heard after its commit."""

    async def run() -> None:
        async with start() as trainer:
            giving_way = trainer.scripted.llm.hold("refitd_give_way")
            trainer.scripted.llm.requests_added += 1
            settling = trainer.scripted.llm.hold("is_sleeping")
            committing = asyncio.create_task(trainer.commit())
            await settling.begun.wait()
            coming = asyncio.create_task(trainer.look())
            await giving_way.begun.wait()
            settling.may_end.set()
            await committing
            giving_way.may_end.set()
            assert (await coming).version == 2

    asyncio.run(run())


def test_a_second_commit_that_is_refused_leaves_the_first_what_stands_by(start: Start) -> None:
    """Where that fails in turn, it is known that new weights are there."""

    async def run() -> None:
        async with start() as trainer:
            trainer.rings()
            committing, settling = await in_its_window(trainer)
            with pytest.raises(ProtocolError) as refused:
                await trainer.commit()
            assert refused.value.code is ErrorCode.REFIT_IN_PROGRESS
            settling.may_end.set()
            with pytest.raises(ProtocolError):
                await committing
            assert trainer.state is EngineState.TORN

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        {"ok": True, "waiting": False},
        [{"ok": True, "waiting": True}, {"ok": True, "waiting": False}],
        worker_refusal(ErrorCode.MANIFEST_MISMATCH),
    ],
)
def test_where_nothing_can_wait_it_is_not_tried_again(start: Start, answer: Any) -> None:
    """Before another commit has shown that it may be worth it; requests pass as ever."""

    async def run() -> None:
        async with start() as trainer:
            trainer.scripted.llm.failures["refitd_stand_by"] = answer
            await trainer.commit()
            keeping = trainer.standing._keeping
            assert keeping is not None
            async with asyncio.timeout(30):
                await keeping
            assert (await trainer.look()).version == 2
            del trainer.scripted.llm.failures["refitd_stand_by"]
            await trainer.commit()
            await trainer.until(Standing.UP)

    asyncio.run(run())


@pytest.mark.parametrize("commits", [True, False])
def test_a_worker_that_cannot_give_way_may_have_copied(
    start: Start, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    """Nobody knows, and another may even have said so: it is as if it had been rung for."""
    monkeypatch.setattr(standing_module, "RELEASE_SECONDS", 30.0 if commits else 0.01)

    async def run() -> None:
        async with start() as trainer:
            trainer.scripted.llm.failures["refitd_give_way"] = [worker_refusal(ErrorCode.INTERNAL), RUNG]
            coming = asyncio.create_task(trainer.look())
            await trainer.until(Standing.RUNG)
            if commits:
                await trainer.commit()
                assert (await coming).version == 2
            else:
                with pytest.raises(ProtocolError) as refused:
                    await coming
                assert refused.value.code is ErrorCode.TORN

    asyncio.run(run())


def test_an_engine_that_dies_meanwhile_says_so(start: Start) -> None:
    """To whoever comes, who would otherwise wait for ever."""

    async def run() -> None:
        async with start() as trainer:
            trainer.scripted.llm.failures["refitd_give_way"] = RuntimeError("the device is gone")
            with pytest.raises(ProtocolError) as refused:
                await trainer.look()
            assert refused.value.code is ErrorCode.ENGINE_DEAD
            assert not trainer.standing.is_up

    asyncio.run(run())


def test_a_daemon_that_stops_lets_none_rise(start: Start) -> None:
    async def run() -> None:
        async with start() as trainer:
            await trainer.scripted.app.refit.settle()
            keeping = trainer.standing._keeping
            assert keeping is not None
            async with asyncio.timeout(30):
                await keeping
            assert not trainer.standing.is_up

    asyncio.run(run())


def test_a_daemon_that_stops_serves_nothing_that_was_not_committed(start: Start) -> None:
    """Requests that have come may still be answered; the commit that follows the ringing is refused."""

    async def run() -> None:
        async with start() as trainer:
            trainer.rings()
            coming = asyncio.create_task(trainer.look())
            await trainer.until(Standing.RUNG)
            await trainer.scripted.app.refit.settle()
            with pytest.raises(ProtocolError) as refused:
                await coming
            assert refused.value.code is ErrorCode.TORN

    asyncio.run(run())


def test_a_daemon_that_stops_ends_what_its_commit_did_not(start: Start) -> None:
    """That had come, and was given up before a worker was asked for it."""

    async def run() -> None:
        async with start() as trainer:
            trainer.rings()
            committing, settling = await in_its_window(trainer)
            stopping = asyncio.create_task(trainer.scripted.app.refit.settle())
            await asyncio.sleep(0)
            settling.may_end.set()
            await stopping
            with pytest.raises(ProtocolError):
                await committing
            assert trainer.state is EngineState.TORN

    asyncio.run(run())


def test_it_is_not_rehearsed_away(start: Start) -> None:
    """A rehearsal ends what was prepared; of what had been rung for nobody would know."""

    async def run() -> None:
        async with start() as trainer:
            source = await trainer.scripted.open(trainer.session, trainer.epoch, "bucket")
            trainer.scripted.app.refit._sources.find(source).replayed = True
            await trainer.until(Standing.UP)
            trainer.scripted.app.engine._awake_seconds = 1.0
            sent: list[str] = []
            trainer.scripted.app.engine._sent_directly = lambda method, _: sent.append(method)  # type: ignore[method-assign, assignment, func-returns-value]
            command = BeginRefit(epoch=trainer.epoch, source=source)
            await trainer.scripted.ask(trainer.session, command, RefitBegan)
            assert "refitd_rehearse" not in sent

    asyncio.run(run())


def test_none_rises_while_nan_is_left_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit takes it out first, by workers in which nothing waits for a trainer."""
    monkeypatch.setattr(standing_module, "QUIET_SECONDS", QUIET_SECONDS)

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            trainer = await opened(scripted)
            await trainer.commit()
            scripted.llm.nan_seen = True
            await trainer.has_looked()
            assert trainer.standing.state is Standing.DOWN
            await trainer.commit()
            assert not scripted.llm.nan_seen
            await trainer.until(Standing.UP)

    asyncio.run(run())


def test_it_gives_way_before_nan_is_cleaned_away(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was rung for and not committed ends in a refit, which waits for the cleaning."""
    monkeypatch.setattr(standing_module, "RELEASE_SECONDS", 0.01)

    async def run() -> None:
        async with start() as trainer:
            trainer.rings()
            trainer.scripted.app.engine.note_nan()
            cleaning = trainer.scripted.app.commit.cleaning.task
            assert cleaning is not None
            async with asyncio.timeout(30):
                await cleaning
            assert trainer.state is EngineState.TORN

    asyncio.run(run())
