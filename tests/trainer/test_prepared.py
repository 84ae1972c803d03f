"""Prepared refits as the daemon sees them: what is rung and said in which order, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AbortRefit,
    AcquireWriter,
    CommitRefit,
    FinishRefit,
    OpenSource,
    PrepareRefit,
    RefitCommitted,
    RefitReport,
    ReleaseWriter,
)
from refit_trainer import (
    AsyncDaemon,
    ClientClosed,
    Daemon,
    NotShareable,
    PreparedRefit,
    RefitdError,
    share_parameters,
)
from refit_trainer.prepared import take
from refit_trainer.report import ComingReport
from refit_trainer.sharing import shared_module
from refit_trainer.steps import Steps
from tests.trainer.answering import EPOCH, REFIT, RING, SOURCE, WORKERS, Answering, ListedBell
from tests.trainer.background import in_background, stands_waiting
from tests.trainer.granted import REPORT
from tests.trainer.peer import Peer
from tests.waiting import until


@pytest.fixture
def daemon(peer: Peer) -> Answering:
    return Answering(peer)


@pytest.fixture
def model() -> torch.nn.Module:
    return share_parameters(torch.nn.Linear(2, 2))


@pytest.fixture
def rung(daemon: Answering, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> ListedBell:
    """The model's memory has a bell, as it would have on a GPU."""
    shared = shared_module(model)
    assert shared is not None
    monkeypatch.setattr(shared.memory, "bell", lambda: daemon.bell)
    return daemon.bell


def test_a_session_that_is_closed_lets_go_of_its_bells(
    client: Daemon, daemon: Answering, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the client is still there, and a refit that nobody has ended: what a device has of a bell is given back
    with it."""
    made: list[weakref.ref[ListedBell]] = []

    def bell() -> ListedBell:
        new = ListedBell()
        made.append(weakref.ref(new))
        return new

    shared = shared_module(model)
    assert shared is not None
    monkeypatch.setattr(shared.memory, "bell", bell)
    client.prepare_refit(model)
    assert PrepareRefit in map(type, daemon.asked)
    [kept] = made
    assert kept() is not None
    client.close()
    gc.collect()
    assert kept() is None


def test_the_options_are_sent_with_what_prepares(client: Daemon, daemon: Answering, model: torch.nn.Module) -> None:
    """What finishes it says nothing but which it is."""
    with client.prepare_refit(model, policy="abort", version=9, only=["weight"], hold_seconds=2.5) as prepared:
        prepared.refit()
    sent = {type(body): body for body in daemon.asked}
    prepare = sent[PrepareRefit]
    assert (prepare.epoch, prepare.source, prepare.policy, prepare.version) == (EPOCH, SOURCE, "abort", 9)
    assert (prepare.only, prepare.hold_seconds) == (["weight"], 2.5)
    assert sent[FinishRefit] == FinishRefit(epoch=EPOCH, refit=REFIT)


def test_the_bell_is_rung_before_anything_is_sent(
    client: Daemon, daemon: Answering, rung: ListedBell, model: torch.nn.Module
) -> None:
    """And made ready while there is time; the source is opened with it once."""
    for _ in range(2):
        with client.prepare_refit(model) as prepared:
            prepared.refit()
    once = ["PrepareRefit", "ready", (RING, WORKERS), "FinishRefit"]
    said = [said for said in rung.said if said != "awaited"]
    assert said == ["AcquireWriter", "OpenSource", *once, *once]
    opened = next(body for body in daemon.asked if isinstance(body, OpenSource))
    assert opened.bell == rung.segment


def test_nothing_is_rung_where_nothing_waits(
    client: Daemon, daemon: Answering, rung: ListedBell, model: torch.nn.Module
) -> None:
    """Nor where it is aborted."""
    with client.prepare_refit(model) as prepared:
        prepared.abort()
    daemon.ring = None
    with client.prepare_refit(model) as prepared:
        prepared.refit()
    assert not [said for said in rung.said if isinstance(said, tuple)]


def test_a_refit_of_the_same_ends_it(
    client: Daemon, daemon: Answering, rung: ListedBell, model: torch.nn.Module
) -> None:
    """As its own `refit()` does; what it names are the options prepared, the others are left out."""
    with client.prepare_refit(model, policy="keep", only=["weight"], hold_seconds=2.5) as prepared:
        report = client.refit(model, only=["weight"], version=None)
        assert (RING, WORKERS) in rung.said
    assert report == prepared.report() == REPORT
    assert daemon.since_prepared() == [FinishRefit]


def test_it_needs_no_block(client: Daemon, daemon: Answering, model: torch.nn.Module) -> None:
    client.prepare_refit(model)
    assert client.refit(model) == REPORT
    assert daemon.since_prepared() == [FinishRefit]


def test_a_refit_of_the_same_comes_back_when_every_worker_holds_it(
    client: Daemon, daemon: Answering, rung: ListedBell, model: torch.nn.Module
) -> None:
    """Before the daemon has answered."""
    rung.has_arrived = True
    daemon.silent.add(FinishRefit)
    with client.prepare_refit(model):
        report = client.refit(model)
        daemon.came.acquire()
        assert isinstance(report, ComingReport)
        daemon.unanswered[0].reply(RefitCommitted(report=REPORT))
    assert report == REPORT


@pytest.mark.usefixtures("daemon")
def test_one_of_several_threads_ends_it(client: Daemon, model: torch.nn.Module) -> None:
    """The other one has a refit of its own, and is not told that this has ended."""
    prepared = client.prepare_refit(model)
    assert take(client._prepared, model, None, {}) is prepared
    assert take(client._prepared, model, None, {}) is None
    prepared.refit()


OTHERS = {
    "policy": "this is not the one that was prepared: policy is 'abort', and was 'keep' there",
    "attest": "this is not the one that was prepared: attest is 'off', and was not named there",
    "module": "this is not the one that was prepared: it is of another module",
    "specs": "this is not the one that was prepared: it has specs",
    "ended": "$",
}


@pytest.mark.parametrize("other", OTHERS)
def test_any_other_refit_is_one_of_its_own(
    client: Daemon, daemon: Answering, model: torch.nn.Module, other: str
) -> None:
    """Which the daemon refuses while this one is prepared; the trainer is told in what they differ."""
    others: dict[str, Callable[[], object]] = {
        "policy": lambda: client.refit(model, policy="abort"),
        "attest": lambda: client.refit(model, attest="off"),
        "module": lambda: client.refit(share_parameters(torch.nn.Linear(2, 2))),
        "specs": lambda: client.refit(model, []),
        "ended": lambda: client.refit(model),
    }
    with client.prepare_refit(model, policy="keep") as prepared:
        if other == "ended":
            prepared.abort()
        daemon.refuses[CommitRefit] = ErrorCode.REFIT_IN_PROGRESS
        with pytest.raises(RefitdError, match=OTHERS[other]) as refused:
            others[other]()
        assert refused.value.code is ErrorCode.REFIT_IN_PROGRESS
        assert ("prepared" in str(refused.value)) == (other != "ended")
        prepared.abort()
    assert FinishRefit not in daemon.since_prepared()


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("end", ["refit", "abort"])
def test_a_client_lets_go_of_what_has_ended(client: Daemon, end: str) -> None:
    """Else its last module would stay in memory, on a GPU too."""
    model = share_parameters(torch.nn.Linear(2, 2))
    prepared = weakref.ref(client.prepare_refit(model))
    getattr(prepared(), end)()
    gc.collect()
    assert prepared() is None


@pytest.mark.usefixtures("daemon")
def test_a_refit_ends_what_was_prepared_last(client: Daemon, model: torch.nn.Module) -> None:
    """The daemon has waited for none of those before, which stay in nobody's memory."""
    before = [weakref.ref(client.prepare_refit(model, only=["weight"])) for _ in range(8)]
    last = client.prepare_refit(model)
    assert client.refit(model) == last.report()
    gc.collect()
    assert not any(prepared() for prepared in before)


def test_a_coroutine_refits_the_same(peer: Peer, daemon: Answering, model: torch.nn.Module) -> None:
    async def both() -> RefitReport:
        async with AsyncDaemon.connect(peer.endpoint) as client, await client.prepare_refit(model, attest="full"):
            return await client.refit(model, attest="full")  # type: ignore[return-value]

    assert asyncio.run(both()) == REPORT
    assert daemon.since_prepared() == [FinishRefit]


def test_a_bell_that_cannot_be_made_ready_ends_the_refit(
    client: Daemon, daemon: Answering, rung: ListedBell, model: torch.nn.Module
) -> None:
    """The engine does not stand still for a trainer that will not come."""
    rung.failure = RuntimeError("no device")
    with pytest.raises(RuntimeError, match="no device"):
        client.prepare_refit(model)
    assert daemon.since_prepared() == [AbortRefit]
    assert client.refit(model) == REPORT


def test_a_bell_that_cannot_be_rung_ends_the_refit(
    client: Daemon, daemon: Answering, rung: ListedBell, model: torch.nn.Module
) -> None:
    rung.ring_failure = RuntimeError("an illegal address")
    with pytest.raises(RuntimeError, match="illegal"), client.prepare_refit(model) as prepared:
        prepared.refit()
    assert daemon.since_prepared() == [AbortRefit]
    assert client.refit(model) == REPORT


def test_what_the_workers_say_by_the_bell_is_enough(
    client: Daemon, daemon: Answering, rung: ListedBell, model: torch.nn.Module
) -> None:
    """The parameters may be written again before the daemon has answered, which leaving the block waits for. Whatever
    is asked for meanwhile comes behind it."""
    rung.has_arrived = True
    daemon.silent.add(FinishRefit)
    with client.prepare_refit(model) as prepared:
        prepared.refit()
        daemon.came.acquire()
        refitting, outcome = in_background(client.refit, model)
        assert daemon.since_prepared() == [FinishRefit]
        daemon.unanswered[0].reply(RefitCommitted(report=REPORT))
    assert prepared.report() == REPORT
    refitting.join()
    assert outcome == [REPORT]
    assert daemon.since_prepared() == [FinishRefit, CommitRefit]


def test_what_fails_behind_the_bell_is_raised_when_the_block_is_left(
    client: Daemon, daemon: Answering, rung: ListedBell, model: torch.nn.Module
) -> None:
    rung.has_arrived = True
    daemon.refuses[FinishRefit] = ErrorCode.ENGINE_DEAD
    with pytest.raises(RefitdError) as failed, client.prepare_refit(model) as prepared:
        prepared.refit()
    assert failed.value.code is ErrorCode.ENGINE_DEAD


def test_it_waits_for_no_refit_that_waits_for_it(client: Daemon, daemon: Answering, model: torch.nn.Module) -> None:
    """One of another thread, between two of its steps: the next one comes behind this refit."""
    role, thread = client._daemon._role, client._thread
    with client.prepare_refit(model) as prepared:
        thread.call(role.enter(10.0))
        prepared.refit()
        thread.call(role.leave())
    assert prepared.report() == REPORT


@pytest.mark.parametrize("lost", ["the role", "the session"])
def test_what_has_ended_with_the_role_is_one_more_refit(
    client: Daemon, daemon: Answering, model: torch.nn.Module, lost: str
) -> None:
    """Given up by the same client, or gone with a session whose lease ran out."""
    with client.prepare_refit(model) as prepared:
        if lost == "the role":
            client.release_writer()
        else:
            client._daemon._role._session = "the one before"
        prepared.refit()
    assert prepared.report() == REPORT
    assert [kind for kind in daemon.since_prepared() if kind is not ReleaseWriter] == [
        AbortRefit,
        AcquireWriter,
        OpenSource,
        CommitRefit,
    ]


@pytest.mark.usefixtures("daemon")
def test_the_bell_that_is_rung_is_that_of_the_source_prepared(
    client: Daemon, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the next one's under the same number, whose copies wait for something else."""
    bells = [ListedBell(), ListedBell()]
    shared = shared_module(model)
    assert shared is not None
    monkeypatch.setattr(shared.memory, "bell", iter(bells).__next__)
    first = client.prepare_refit(model)
    client.release_writer()
    second = client.prepare_refit(model)
    first.refit()
    assert [bell.said.count((RING, WORKERS)) for bell in bells] == [1, 0]
    second.abort()


def test_closing_waits_for_no_refit(client: Daemon, daemon: Answering, model: torch.nn.Module) -> None:
    daemon.silent.add(FinishRefit)
    refitting, outcome = in_background(client.prepare_refit(model).refit)
    daemon.came.acquire()
    client.close()
    refitting.join()
    assert isinstance(outcome[0], ClientClosed)


@pytest.mark.usefixtures("daemon")
def test_a_client_may_be_closed_in_the_block(client: Daemon, model: torch.nn.Module) -> None:
    """Behind the refit: its version is published."""
    with client.prepare_refit(model) as prepared:
        prepared.refit()
        client.close()
    assert prepared.report() == REPORT


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("end", ["an exception", "abort"])
def test_what_a_closed_client_has_prepared_has_ended(client: Daemon, model: torch.nn.Module, end: str) -> None:
    """As in a signal's handler, which closes it and has the program end: that goes on."""

    def stop(prepared: PreparedRefit) -> None:
        client.close()
        if end == "abort":
            prepared.abort()
        raise SystemExit

    with pytest.raises(SystemExit), client.prepare_refit(model) as prepared:
        stop(prepared)


@pytest.mark.usefixtures("daemon")
def test_a_closed_coroutine_client_has_ended_it_too(peer: Peer, model: torch.nn.Module) -> None:
    async def close_inside() -> None:
        async with AsyncDaemon.connect(peer.endpoint) as client, await client.prepare_refit(model):
            await client.close()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(close_inside())


def test_closing_in_the_block_waits_for_what_the_workers_have(
    client: Daemon, daemon: Answering, rung: ListedBell, model: torch.nn.Module
) -> None:
    """Its answer is due in a moment, and leaving the block tells what that was."""
    rung.has_arrived = True
    daemon.silent.add(FinishRefit)
    with client.prepare_refit(model) as prepared:
        prepared.refit()
        daemon.came.acquire()
        closing, _ = in_background(client.close)
        until(lambda: stands_waiting(closing), "the end to wait for the answer")
        daemon.unanswered[0].reply(RefitCommitted(report=REPORT))
        closing.join()
    assert prepared.report() == REPORT


def test_leaving_the_block_withdraws_it_once(client: Daemon, daemon: Answering, model: torch.nn.Module) -> None:
    with client.prepare_refit(model) as prepared:
        prepared.abort()
    assert daemon.since_prepared() == [AbortRefit]


@pytest.mark.usefixtures("daemon")
def test_a_second_end_is_told_the_first(client: Daemon, model: torch.nn.Module) -> None:
    """Somewhere else in the program; nobody has to guess which."""

    def refitted(prepared: PreparedRefit) -> None:
        prepared.refit()

    def aborted(prepared: PreparedRefit) -> None:
        prepared.abort()

    def left(prepared: PreparedRefit) -> None:
        with pytest.warns(RuntimeWarning), prepared:
            pass

    for end, how in ((refitted, r"by refit\(\)"), (aborted, r"by abort\(\)"), (left, "when its block was left")):
        prepared = client.prepare_refit(model)
        end(prepared)
        with pytest.raises(RefitdError, match=f"has ended {how}: prepare another"):
            prepared.refit()


@pytest.mark.usefixtures("daemon")
def test_a_second_end_of_an_asynchronous_one_is_told_the_first(peer: Peer, model: torch.nn.Module) -> None:
    async def run() -> None:
        async with AsyncDaemon.connect(peer.endpoint) as client:
            async with await client.prepare_refit(model) as prepared:
                await prepared.refit()
                with pytest.raises(RefitdError, match=r"by refit\(\)"):
                    await prepared.refit()
            aborted = await client.prepare_refit(model)
            await aborted.abort()
            with pytest.raises(RefitdError, match=r"by abort\(\)"):
                await aborted.refit()
            with contextlib.suppress(ZeroDivisionError):
                async with await client.prepare_refit(model) as left:
                    raise ZeroDivisionError
            with pytest.raises(RefitdError, match="when its block was left"):
                await left.refit()

    asyncio.run(run())


def test_a_block_that_forgets_its_refit_is_warned_of(client: Daemon, daemon: Answering, model: torch.nn.Module) -> None:
    """Neither an exception nor an abort says that it is meant; both would."""
    with pytest.warns(RuntimeWarning, match="without refit"), client.prepare_refit(model):
        pass
    assert daemon.since_prepared() == [AbortRefit]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError), client.prepare_refit(model):
            raise ZeroDivisionError
        with client.prepare_refit(model) as prepared:
            prepared.abort()


@pytest.mark.parametrize("weights", [{"weight": torch.ones(2)}, iter([("weight", torch.ones(2))])])
def test_weights_that_are_no_module_cannot_be_prepared(peer: Peer, client: Daemon, weights: Any) -> None:
    """With what to do instead; nothing was asked of the daemon."""
    with pytest.raises(NotShareable, match=r"only a module that was shared.*use refit\(\)"):
        client.prepare_refit(weights)
    assert peer.asked.empty()


def test_what_are_no_weights_cannot_be_prepared(client: Daemon) -> None:
    with pytest.raises(TypeError, match=r"a refit takes a module.*no int"):
        client.prepare_refit(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("hold_seconds", [0.0, -1.0, math.nan])
def test_a_hold_that_is_none_is_the_callers_mistake(
    client: Daemon, model: torch.nn.Module, hold_seconds: float
) -> None:
    with pytest.raises(ValueError, match="hold_seconds"):
        client.prepare_refit(model, hold_seconds=hold_seconds)


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_REFIT, ErrorCode.STALE_EPOCH, ErrorCode.NO_SESSION])
def test_what_an_abort_is_answered_with_does_not_matter(
    client: Daemon, daemon: Answering, model: torch.nn.Module, code: ErrorCode
) -> None:
    """The daemon had ended it by itself; what the block raised is what its caller sees."""
    daemon.refuses[AbortRefit] = code
    with pytest.raises(ZeroDivisionError), client.prepare_refit(model):
        raise ZeroDivisionError
    assert daemon.since_prepared() == [AbortRefit]


def test_a_block_that_is_left_waits_for_what_became_of_one_more_refit(
    client: Daemon, daemon: Answering, model: torch.nn.Module
) -> None:
    """That may have come back before its answer; nobody has to ask for the report to be told of a failure."""
    daemon.refuses[FinishRefit] = ErrorCode.UNKNOWN_REFIT
    coming: Future[RefitReport] = Future()

    def again() -> Steps[Any]:
        coming.set_exception(RefitdError("not published"))
        return ComingReport(coming)
        yield

    prepared = client.prepare_refit(model)
    prepared._preparation.again = again
    with pytest.raises(RefitdError, match="not published"), prepared:
        prepared.refit()


def test_what_comes_too_late_is_one_more_refit(client: Daemon, daemon: Answering, model: torch.nn.Module) -> None:
    """With the options it was prepared with."""
    daemon.refuses[FinishRefit] = ErrorCode.UNKNOWN_REFIT
    with client.prepare_refit(model, policy="finish", only=["weight"], hold_seconds=1.0) as prepared:
        prepared.refit()
    assert prepared.report() == REPORT
    commit = daemon.asked[-1]
    assert isinstance(commit, CommitRefit)
    assert (commit.policy, commit.only) == ("finish", ["weight"])


@pytest.mark.parametrize("code", [ErrorCode.STALE_EPOCH, ErrorCode.ATTEST_FAILED, ErrorCode.TORN])
def test_other_failures_are_raised(client: Daemon, daemon: Answering, model: torch.nn.Module, code: ErrorCode) -> None:
    """Once, and whenever the report is asked for; the role is free for the next refit."""
    daemon.refuses[FinishRefit] = code
    with client.prepare_refit(model) as prepared, pytest.raises(RefitdError) as failed:
        prepared.refit()
    assert failed.value.code is code
    with pytest.raises(RefitdError, match=code):
        prepared.report()
    assert CommitRefit not in daemon.since_prepared()
    assert client.refit(model) == REPORT
