"""Commits that are sent while the module is looked at, as the daemon sees them."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from refit_protocol.bell import RELEASE_OFFSET_BYTES, withdrawal
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AbortRefit,
    AcquireWriter,
    ApplyBucket,
    CommitRefit,
    FinishRefit,
    GetStatus,
    OpenSource,
    RefitCommitted,
    RefitReport,
    ReleaseWriter,
    Request,
    SourceOpened,
    WriterAcquired,
    WriterReleased,
)
from refit_trainer import (
    AsyncDaemon,
    ClientClosed,
    Daemon,
    DaemonRestarted,
    NotShareable,
    RefitdError,
    daemon_refit,
    early_commit,
    share_parameters,
)
from refit_trainer import client as client_module
from refit_trainer.daemon_refit import DaemonRefit
from refit_trainer.early_commit import Done, EarlyCommit
from refit_trainer.memory import MemfdMemory
from refit_trainer.report import ComingReport
from refit_trainer.sharing import SharedModule, shared_before
from tests.lending import HostBell
from tests.trainer.background import in_background
from tests.trainer.granted import REPORT, TENSORS, applied, begin, grant
from tests.trainer.peer import STATUS, Asked, Peer
from tests.waiting import until

OPENED = SourceOpened(source=1, path="plan", tensors=1, size_bytes=1, unplanned=[], release=True)


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    shared = share_parameters(torch.nn.Linear(2, 2))
    # Closed with the first refit behind its end, if it ended before the test does.
    kept = shared_before(shared)
    yield shared
    del kept


@pytest.fixture
def bell(monkeypatch: pytest.MonkeyPatch) -> HostBell:
    """Of the memory on this CPU, as it would have one on a GPU."""
    made = HostBell()
    monkeypatch.setattr(MemfdMemory, "bell", lambda _memory: made)
    return made


def word_of(bell: HostBell) -> int:
    return int(bell.memfd.view.numpy()[RELEASE_OFFSET_BYTES:].view("<u4")[0])


def replace_a_parameter(model: torch.nn.Module) -> None:
    model.weight = torch.nn.Parameter(torch.ones(2, 2))


def refit_first(
    peer: Peer, client: Daemon, model: torch.nn.Module, *, release: bool = True, workers: int = 1
) -> OpenSource:
    """As every first one: the source is opened, once the module has been looked at."""
    thread, outcome = in_background(client.refit, model)
    peer.next(AcquireWriter).reply(WriterAcquired(epoch=7))
    opening = peer.next(OpenSource)
    opening.reply(msgspec.structs.replace(OPENED, release=release, workers=workers))
    asked = peer.next(CommitRefit)
    assert asked.body.release is None
    asked.reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [REPORT]
    opened: OpenSource = opening.body
    return opened


def test_it_is_sent_before_the_module_is_looked_at_and_released_behind(
    peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every commit has a number of its own."""
    refit_first(peer, client, model)
    look, may_look = SharedModule.require_in_place, threading.Semaphore(0)

    def late(shared: SharedModule) -> None:
        assert may_look.acquire(timeout=30)
        look(shared)

    monkeypatch.setattr(SharedModule, "require_in_place", late)
    before = word_of(bell)
    for _ in range(2):
        thread, outcome = in_background(client.refit, model)
        asked = peer.next(CommitRefit)
        assert word_of(bell) == before != asked.body.release
        may_look.release()
        before = until(lambda asked=asked: word_of(bell) == asked.body.release and word_of(bell), "the release")
        asked.reply(RefitCommitted(report=REPORT))
        thread.join()
        assert outcome == [REPORT]


def test_coroutines_send_it_before_they_look_too(
    peer: Peer, model: torch.nn.Module, bell: HostBell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the look keeps the loop from everything else. What has not gone out could do nothing but shut the gate
    for a module that has moved."""

    def looked(_shared: SharedModule) -> None:
        asked = peer.next(CommitRefit)
        assert word_of(bell) != asked.body.release
        asked.reply(RefitCommitted(report=REPORT))

    async def scenario() -> None:
        async with AsyncDaemon.connect(peer.endpoint) as daemon:
            refit = asyncio.create_task(daemon.refit(model))
            for kind, answer in (
                (AcquireWriter, WriterAcquired(epoch=7)),
                (OpenSource, OPENED),
                (CommitRefit, RefitCommitted(report=REPORT)),
            ):
                (await asyncio.to_thread(peer.next, kind)).reply(answer)
            await refit
            monkeypatch.setattr(SharedModule, "require_in_place", looked)
            assert await daemon.refit(model, deadline_seconds=1.0) == REPORT

    asyncio.run(scenario())


def test_where_the_daemon_would_not_wait_the_look_comes_first(
    peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell
) -> None:
    refit_first(peer, client, model, release=False)
    replace_a_parameter(model)
    with pytest.raises(NotShareable):
        client.refit(model)
    share_parameters(model)
    thread, outcome = in_background(client.refit, model)
    peer.next(OpenSource).reply(SourceOpened(source=2, path="plan", tensors=1, size_bytes=1, unplanned=[]))
    asked = peer.next(CommitRefit)
    assert (asked.body.release, word_of(bell)) == (None, 0)
    asked.reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [REPORT]


def moved(peer: Peer, client: Daemon, model: torch.nn.Module) -> tuple[Callable[[], None], list[object], CommitRefit]:
    refit_first(peer, client, model)
    replace_a_parameter(model)
    thread, outcome = in_background(client.refit, model)
    return thread.join, outcome, peer.next(CommitRefit)


def test_of_memory_that_has_moved_it_is_withdrawn(
    peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell
) -> None:
    """The daemon's refusal is waited for, and the role is kept; the next refit goes on with the same session."""
    ended, outcome, asked = moved(peer, client, model)
    until(lambda: word_of(bell) == withdrawal(asked.body.release), "the withdrawal")
    asked.fail(ErrorCode.REFIT_FAILED)
    ended()
    assert isinstance(outcome[0], NotShareable)
    share_parameters(model)
    thread, outcome = in_background(client.refit, model)
    peer.next(OpenSource).reply(SourceOpened(source=2, path="plan", tensors=1, size_bytes=1, unplanned=[]))
    peer.next(CommitRefit).reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [REPORT]


@pytest.mark.usefixtures("bell")
def test_a_daemon_that_does_not_answer_a_withdrawal_loses_its_writer(
    peer: Peer, client: Daemon, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be waiting for requests, and would wait for a release afterwards."""
    monkeypatch.setattr(early_commit, "_ANSWER_SECONDS", 0.01)
    ended, outcome, _ = moved(peer, client, model)
    peer.next(ReleaseWriter).reply(WriterReleased())
    ended()
    assert isinstance(outcome[0], NotShareable)


def test_what_the_daemon_refuses_is_raised(peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell) -> None:
    """Also before the module was looked at."""
    refit_first(peer, client, model)
    thread, outcome = in_background(client.refit, model)
    peer.next(CommitRefit).fail(ErrorCode.VERSION_NOT_INCREASING)
    thread.join()
    assert outcome[0].code is ErrorCode.VERSION_NOT_INCREASING
    assert word_of(bell) % 2 == 0


# --- done before it is answered ---------------------------------------------------------------------------------------


@pytest.fixture
def awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for memory on a GPU: the calling thread looks at the bell while it waits."""
    monkeypatch.setitem(daemon_refit.AWAKE_SECONDS, "cpu", 30.0)


def done_early(
    peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell, workers: int = 1
) -> tuple[Asked, ComingReport]:
    """A refit that has come back, and its commit that has not been answered."""
    refit_first(peer, client, model, workers=workers)
    thread, outcome = in_background(client.refit, model)
    asked = peer.next(CommitRefit)
    number = until(lambda: word_of(bell) == asked.body.release and word_of(bell), "the release")
    for worker in range(workers):
        assert thread.is_alive()
        bell.tell_done(number, worker)
    thread.join(30)
    (report,) = outcome
    assert isinstance(report, ComingReport)
    return asked, report


@pytest.mark.usefixtures("awake")
def test_a_refit_comes_back_when_every_worker_has_told_that_it_is_done(
    peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell
) -> None:
    """The report waits for the answer, and so does whatever the client asks for from then on."""
    asked, report = done_early(peer, client, model, bell, workers=2)
    reading, version = in_background(lambda: report.version)
    looking, status = in_background(client.status)
    reading.join(0.02)
    assert reading.is_alive()
    with pytest.raises(queue.Empty):
        peer.asked.get(timeout=0.02)
    asked.reply(RefitCommitted(report=REPORT))
    peer.next(GetStatus).reply(STATUS)
    reading.join()
    looking.join()
    assert version == [REPORT.version]
    assert report == REPORT
    assert status == [STATUS]


@pytest.mark.usefixtures("awake")
def test_what_fails_behind_that_is_told_by_the_report_and_the_log(
    peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell, caplog: pytest.LogCaptureFixture
) -> None:
    """The refit has ended all the same: the next one goes on."""
    asked, report = done_early(peer, client, model, bell)
    asked.fail(ErrorCode.ENGINE_DEAD)
    with pytest.raises(RefitdError):
        assert report.digest
    until(lambda: "they were not published" in caplog.text, "the log")
    thread, outcome = in_background(client.refit, model)
    peer.next(CommitRefit).reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [REPORT]


@pytest.mark.usefixtures("awake")
def test_what_fails_while_it_is_seen_to_be_done_leaves_the_role(
    peer: Peer, client: Daemon, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, bell: HostBell
) -> None:
    """Whichever thread is first: one of them ends the refit."""
    refit_first(peer, client, model)
    committed, looks, has_failed = DaemonRefit.committed, threading.Event(), threading.Event()

    async def failing(refit: DaemonRefit, shared: SharedModule) -> RefitReport:
        try:
            return await committed(refit, shared)
        finally:
            has_failed.set()

    def seen_too_late(_done: Done) -> bool:
        looks.set()
        return has_failed.wait(timeout=30)

    monkeypatch.setattr(DaemonRefit, "committed", failing)
    monkeypatch.setattr(Done, "is_told", seen_too_late)
    thread, outcome = in_background(client.refit, model)
    asked = peer.next(CommitRefit)
    assert looks.wait(timeout=30)
    asked.fail(ErrorCode.ENGINE_DEAD)
    thread.join()
    monkeypatch.undo()
    monkeypatch.setattr(MemfdMemory, "bell", lambda _memory: bell)
    assert isinstance(outcome[0], RefitdError)
    refit_once(peer, client, model)


@pytest.mark.usefixtures("awake")
def test_a_client_that_is_closed_waits_for_the_answer(
    peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell
) -> None:
    """It comes in a moment, and the report may be read behind that."""
    asked, report = done_early(peer, client, model, bell)
    thread, _ = in_background(client.close)
    thread.join(0.05)
    assert thread.is_alive()
    asked.reply(RefitCommitted(report=REPORT))
    thread.join()
    assert report.version == REPORT.version


@pytest.mark.usefixtures("awake")
def test_a_client_that_is_closed_waits_for_no_answer_that_never_comes(
    peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever reads the report is told why there is none."""
    _, report = done_early(peer, client, model, bell)
    monkeypatch.setattr(client_module, "_CLEAN_UP_SECONDS", 0.01)
    client.close()
    with pytest.raises(ClientClosed):
        assert report.version


def finish_asked(peer: Peer) -> Asked:
    """Of a refit through buckets, all of which have been read."""
    begin(peer)
    while isinstance((asked := peer.next()).body, ApplyBucket):
        applied(asked)
    assert isinstance(asked.body, FinishRefit)
    return asked


@pytest.mark.usefixtures("awake")
@pytest.mark.parametrize("fails", [False, True])
def test_a_refit_through_buckets_comes_back_as_early(peer: Peer, client: Daemon, bell: HostBell, fails: bool) -> None:
    """Whatever the answer is, the next one goes on behind it."""
    thread, outcome = in_background(client.refit, TENSORS)
    peer.next(AcquireWriter).reply(WriterAcquired(epoch=7))
    peer.next(OpenSource).reply(msgspec.structs.replace(OPENED, workers=2))
    asked = finish_asked(peer)
    for worker in range(2):
        assert thread.is_alive()
        bell.tell_done(asked.body.done, worker)
    thread.join(30)
    (report,) = outcome
    assert isinstance(report, ComingReport)
    thread, outcome = in_background(client.refit, TENSORS)
    with pytest.raises(queue.Empty):
        peer.asked.get(timeout=0.02)
    if fails:
        asked.fail(ErrorCode.ENGINE_DEAD)
        peer.next(AbortRefit).fail(ErrorCode.UNKNOWN_REFIT)
        with pytest.raises(RefitdError):
            assert report.version
    else:
        asked.reply(RefitCommitted(report=REPORT))
        assert report == REPORT
    following = finish_asked(peer)
    assert following.body.done > asked.body.done
    following.reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [REPORT]


def test_workers_that_cannot_tell_when_they_are_done_are_not_asked_to(
    peer: Peer, client: Daemon, bell: HostBell
) -> None:
    """One that has no line in the bell, or a daemon that knows of none."""
    thread, outcome = in_background(client.refit, TENSORS)
    grant(peer)
    asked = finish_asked(peer)
    assert asked.body.done is None
    asked.reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [REPORT]
    assert bell.done() == 0


# --- a refit that stands by -------------------------------------------------------------------------------------------


@pytest.fixture
def standing(peer: Peer) -> Iterator[Daemon]:
    with Daemon.connect(peer.endpoint, stand_by=True) as connected:
        yield connected


@pytest.mark.parametrize("option", ["standby", "patience"])
def test_an_option_that_is_none_is_refused(peer: Peer, option: str) -> None:
    """Who has misspelt it would never know that nothing stands by."""
    with pytest.raises(TypeError, match=option):
        Daemon.connect(peer.endpoint, **{option: True})  # type: ignore[arg-type]


def refit_once(peer: Peer, client: Daemon, model: torch.nn.Module, **options: object) -> None:
    thread, outcome = in_background(partial(client.refit, model, **options))
    peer.next(CommitRefit).reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [REPORT]


def test_its_bell_is_rung_behind_the_commit_and_before_the_look(
    peer: Peer, standing: Daemon, model: torch.nn.Module, bell: HostBell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has begun while the module is looked at. The first refit opens the source: nothing stands by yet."""
    assert refit_first(peer, standing, model).stand_by
    assert bell.rung == 0
    look = SharedModule.require_in_place

    def looked(shared: SharedModule) -> None:
        assert bell.rung == 1
        look(shared)

    monkeypatch.setattr(SharedModule, "require_in_place", looked)
    refit_once(peer, standing, model)


@pytest.mark.parametrize("options", [{"only": ["weight"]}, {"version": 9}, {"check_finite": True}])
def test_it_is_not_rung_for_a_refit_of_another_kind(
    peer: Peer, standing: Daemon, model: torch.nn.Module, bell: HostBell, options: dict[str, object]
) -> None:
    """What stands by copies everything, whatever is in it, and may be refused its version behind that."""
    refit_first(peer, standing, model)
    refit_once(peer, standing, model, **options)
    assert bell.rung == 0
    refit_once(peer, standing, model, policy="abort", attest="full", deadline_seconds=9.0)
    assert bell.rung == 1


def test_a_client_that_has_not_asked_for_it_rings_nothing(
    peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell
) -> None:
    assert not refit_first(peer, client, model).stand_by
    refit_once(peer, client, model)
    assert bell.rung == 0


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_what_was_rung_for_without_a_commit_costs_the_role(
    peer: Peer,
    standing: Daemon,
    model: torch.nn.Module,
    bell: HostBell,
    monkeypatch: pytest.MonkeyPatch,
    in_the_middle: bool,
) -> None:
    """The daemon would wait for it: it is told that none comes, before the next refit at the latest."""
    refit_first(peer, standing, model)
    begin, may_begin = DaemonRefit.begin_early, asyncio.Event()

    async def never(refit: DaemonRefit, *arguments: Any) -> None:
        refit._beginning = asyncio.current_task()
        await may_begin.wait()

    monkeypatch.setattr(DaemonRefit, "begin_early", never)
    monkeypatch.setattr(SharedModule, "require_in_place", interrupted)
    if in_the_middle:
        monkeypatch.setattr(HostBell, "ring_awaited", rung_and_interrupted)
    with pytest.raises(KeyboardInterrupt):
        standing.refit(model)
    assert bell.rung == 1
    monkeypatch.undo()
    monkeypatch.setattr(DaemonRefit, "begin_early", begin)
    monkeypatch.setattr(MemfdMemory, "bell", lambda _memory: bell)
    thread, outcome = in_background(standing.refit, model)
    peer.next(ReleaseWriter).reply(WriterReleased())
    peer.next(AcquireWriter).reply(WriterAcquired(epoch=8))
    peer.next(OpenSource).reply(OPENED)
    peer.next(CommitRefit).reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [REPORT]
    # Before the role was given up that would have been one more.
    assert bell.rung == 1


def interrupted(_shared: SharedModule) -> None:
    raise KeyboardInterrupt


def rung_and_interrupted(bell: HostBell) -> bool:
    bell.rung += 1
    raise KeyboardInterrupt


def test_it_is_not_rung_for_while_another_refit_has_the_role(
    peer: Peer, standing: Daemon, model: torch.nn.Module, bell: HostBell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit would have to wait for that one, and that one at the daemon for this commit."""
    refit_first(peer, standing, model)
    other, _ = in_background(standing.refit, TENSORS)
    opening = peer.next(OpenSource)
    look, has_looked = SharedModule.require_in_place, threading.Event()

    def looked(shared: SharedModule) -> None:
        has_looked.set()
        look(shared)

    monkeypatch.setattr(SharedModule, "require_in_place", looked)
    thread, outcome = in_background(standing.refit, model)
    assert has_looked.wait(timeout=30)
    assert bell.rung == 0
    opening.fail(ErrorCode.LIMIT_EXCEEDED)
    peer.next(CommitRefit).reply(RefitCommitted(report=REPORT))
    thread.join()
    other.join()
    assert outcome == [REPORT]


def test_its_commit_overtakes_a_refit_that_was_about_to_begin(
    peer: Peer, standing: Daemon, model: torch.nn.Module, bell: HostBell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one had been handed in, but had not begun: it would wait at the daemon for a commit that waits for it."""
    refit_first(peer, standing, model)
    handed_in, may_go_on, submit = threading.Event(), threading.Event(), standing._thread.submit

    def submitted(work: Any) -> Any:
        running = submit(work)
        handed_in.set()
        return running

    standing._thread.loop.call_soon_threadsafe(may_go_on.wait)
    monkeypatch.setattr(standing._thread, "submit", submitted)
    other, _ = in_background(standing.refit, TENSORS)
    assert handed_in.wait(timeout=30)
    thread, outcome = in_background(standing.refit, model)
    until(lambda: bell.rung == 1, "the bell to be rung")
    may_go_on.set()
    peer.next(CommitRefit).reply(RefitCommitted(report=REPORT))
    peer.next(OpenSource).fail(ErrorCode.LIMIT_EXCEEDED)
    thread.join()
    other.join()
    assert outcome == [REPORT]


# --- ended early ------------------------------------------------------------------------------------------------------


def test_what_was_released_is_not_withdrawn(
    peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several workers some may have begun to write: the others would refuse, and leave the weights torn."""
    refit_first(peer, client, model)
    release = EarlyCommit.release

    def interrupted(commit: EarlyCommit) -> None:
        release(commit)
        raise RuntimeError("interrupted")

    monkeypatch.setattr(EarlyCommit, "release", interrupted)
    monkeypatch.setattr(early_commit, "_ANSWER_SECONDS", 0.01)
    thread, outcome = in_background(client.refit, model)
    asked = peer.next(CommitRefit)
    peer.next(ReleaseWriter).reply(WriterReleased())
    thread.join()
    assert isinstance(outcome[0], RuntimeError)
    assert word_of(bell) == asked.body.release


def test_it_is_withdrawn_though_the_connection_broke(
    peer: Peer, client: Daemon, model: torch.nn.Module, bell: HostBell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of a daemon that is still there wait for a word."""
    refit_first(peer, client, model)
    may_look = threading.Event()

    def late(shared: SharedModule) -> None:
        assert may_look.wait(timeout=30)
        raise NotShareable("moved")

    monkeypatch.setattr(SharedModule, "require_in_place", late)
    thread, outcome = in_background(client.refit, model)
    asked = peer.next(CommitRefit)
    peer.stop()
    peer.start()
    peer.wait_for_hellos(2)
    may_look.set()
    peer.next(ReleaseWriter).reply(WriterReleased())
    thread.join()
    assert isinstance(outcome[0], NotShareable)
    assert word_of(bell) == withdrawal(asked.body.release)


@pytest.mark.usefixtures("bell")
def test_a_second_interrupt_leaves_the_daemon_nothing_to_wait_for(
    peer: Peer, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the answer to the withdrawal is waited for."""
    monkeypatch.setattr(early_commit, "_ANSWER_SECONDS", 3600.0)

    async def next_of(kind: type[Request]) -> Asked:
        return await asyncio.to_thread(peer.next, kind)

    async def scenario() -> None:
        async with AsyncDaemon.connect(peer.endpoint) as daemon:
            refit = asyncio.create_task(daemon.refit(model))
            (await next_of(AcquireWriter)).reply(WriterAcquired(epoch=7))
            (await next_of(OpenSource)).reply(OPENED)
            (await next_of(CommitRefit)).reply(RefitCommitted(report=REPORT))
            await refit
            replace_a_parameter(model)
            refit = asyncio.create_task(daemon.refit(model))
            await next_of(CommitRefit)
            refit.cancel()
            (await next_of(ReleaseWriter)).reply(WriterReleased())
            with pytest.raises(asyncio.CancelledError):
                await refit
            share_parameters(model)
            refit = asyncio.create_task(daemon.refit(model))
            (await next_of(AcquireWriter)).reply(WriterAcquired(epoch=8))
            refit.cancel()
            with pytest.raises(asyncio.CancelledError):
                await refit

    asyncio.run(scenario())


@pytest.mark.usefixtures("bell")
def test_nothing_complains_where_the_client_is_closed_meanwhile(
    peer: Peer, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller is told, and asyncio has nothing to add."""
    client = Daemon.connect(peer.endpoint)
    refit_first(peer, client, model)
    may_look = threading.Event()
    monkeypatch.setattr(SharedModule, "require_in_place", lambda _shared: may_look.wait(timeout=30))
    thread, outcome = in_background(client.refit, model)
    peer.next(CommitRefit)
    client.close()
    may_look.set()
    thread.join()
    assert isinstance(outcome.pop(), ClientClosed)
    del client
    gc.collect()
    assert not caplog.records


@pytest.mark.usefixtures("bell")
def test_a_restart_is_told_before_what_the_look_has_found(peer: Peer, client: Daemon, model: torch.nn.Module) -> None:
    """It is told only once, and what is served since are not the weights that were refitted."""
    refit_first(peer, client, model)
    replace_a_parameter(model)
    peer.stop()
    peer.epoch = 2
    peer.start()
    peer.wait_for_hellos(2)
    until(lambda: client.welcome.epoch == 2, "the client to know of the restart")
    with pytest.raises(DaemonRestarted):
        client.refit(model)
    with pytest.raises(NotShareable):
        client.refit(model)


@pytest.mark.usefixtures("bell")
def test_without_a_connection_the_look_comes_first(peer: Peer, client: Daemon, model: torch.nn.Module) -> None:
    """What it finds does not wait for a daemon that may never come back."""
    refit_first(peer, client, model)
    replace_a_parameter(model)
    peer.stop()
    try:
        until(lambda: not client._daemon.connection.is_up, "the connection to be lost")
        thread, outcome = in_background(client.refit, model)
        thread.join(30)
        assert isinstance(outcome[0], NotShareable)
    finally:
        peer.start()
