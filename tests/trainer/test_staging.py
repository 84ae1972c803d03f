"""Refits as the daemon sees them: roles, sources and buckets, against a peer that answers when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AbortRefit,
    AcquireWriter,
    ApplyBucket,
    BeginRefit,
    BroadcastReceived,
    CloseSource,
    CommitRefit,
    FinishRefit,
    GetStatus,
    OpenSource,
    ReceiveBroadcast,
    RefitAborted,
    RefitBegan,
    RefitCommitted,
    RefitReport,
    RefitValidated,
    ReleaseWriter,
    ReloadWeights,
    Reply,
    Request,
    SourceClosed,
    SourceOpened,
    ValidateRefit,
    WriterAcquired,
    WriterReleased,
)
from refit_protocol.states import EngineState
from refit_trainer import (
    AsyncDaemon,
    Daemon,
    DaemonRestarted,
    DaemonUnreachable,
    Fleet,
    LayoutMismatch,
    RefitdError,
    TensorShape,
    UsedAfterFork,
    one_refit,
    share_parameters,
    writer,
)
from refit_trainer.layouts import layout_of
from refit_trainer.packing import FilledBucket
from refit_trainer.packing_plan import PackingPlan
from refit_trainer.sharing import shared_module
from refit_trainer.steps import Steps
from tests.trainer.background import in_background
from tests.trainer.granted import REPORT, SPECS, TENSORS, applied, begin, finish_begun, grant, open_source
from tests.trainer.peer import STATUS, Peer, endpoint_in, running


@pytest.fixture
def client(peer: Peer) -> Iterator[Daemon]:
    """With buckets that hold two of `TENSORS` each."""
    with Daemon.connect(peer.endpoint, bucket_bytes=128) as connected:
        yield connected


def test_source_is_opened_once(peer: Peer, client: Daemon) -> None:
    """Later refits from the same module are one message each, under the epoch that was granted."""
    model = share_parameters(torch.nn.Linear(2, 2))
    thread, outcome = in_background(lambda: [client.refit(model, version=version) for version in (4, 5)])
    assert grant(peer).kind == "inplace"
    for version in (4, 5):
        asked = peer.next(CommitRefit)
        assert (asked.body.source, asked.body.epoch, asked.body.version) == (1, 7, version)
        asked.reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [[REPORT, REPORT]]


def test_source_of_a_dropped_module_is_closed(peer: Peer, client: Daemon) -> None:
    """When the next one is opened: the daemon does not keep memory mapped that nobody has."""
    for source in (1, 2):
        thread, outcome = in_background(client.refit, share_parameters(torch.nn.Linear(2, 2)))
        if source == 1:
            grant(peer)
        else:
            closed = peer.next(CloseSource)
            assert closed.body.source == 1
            closed.reply(SourceClosed(source=1))
            open_source(peer, source)
        peer.next(CommitRefit).reply(RefitCommitted(report=REPORT))
        thread.join()
        assert outcome == [REPORT]
        del thread
        gc.collect()


def test_restart_opens_the_source_again(peer: Peer, client: Daemon) -> None:
    """Nothing of the old daemon's numbering is used with the new one."""
    model = share_parameters(torch.nn.Linear(2, 2))
    thread, _ = in_background(client.refit, model)
    grant(peer)
    peer.next(CommitRefit).reply(RefitCommitted(report=REPORT))
    thread.join()
    peer.stop()
    peer.epoch = 2
    peer.start()
    peer.wait_for_hellos(2)
    with pytest.raises(DaemonRestarted):
        client.refit(model)
    thread, outcome = in_background(client.refit, model)
    grant(peer, source=9, epoch=1)
    asked = peer.next(CommitRefit)
    assert (asked.body.source, asked.body.epoch) == (9, 1)
    asked.reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [REPORT]


def test_fenced_writer_asks_for_the_role_again(peer: Peer, client: Daemon) -> None:
    """After a takeover the refit fails; the next one starts with the role, it does not reuse the old epoch."""
    model = share_parameters(torch.nn.Linear(2, 2))
    thread, outcome = in_background(client.refit, model)
    grant(peer)
    peer.next(CommitRefit).fail(ErrorCode.STALE_EPOCH)
    thread.join()
    assert isinstance(outcome[0], RefitdError)
    thread, _ = in_background(client.refit, model)
    peer.next(AcquireWriter).fail(ErrorCode.WRITER_BUSY)
    thread.join()


def test_role_asked_for_again_keeps_the_sources(peer: Peer, client: Daemon) -> None:
    """The same epoch means that the daemon still has them open; opened anew they would be mapped twice."""
    model = share_parameters(torch.nn.Linear(2, 2))
    for epoch, opens in ((7, True), (7, False), (9, True)):
        acquiring, _ = in_background(client.acquire_writer)
        peer.next(AcquireWriter).reply(WriterAcquired(epoch=epoch))
        acquiring.join()
        thread, outcome = in_background(client.refit, model)
        if opens:
            open_source(peer, epoch)
        asked = peer.next(CommitRefit)
        assert (asked.body.source, asked.body.epoch) == (epoch, epoch)
        asked.reply(RefitCommitted(report=REPORT))
        thread.join()
        assert outcome == [REPORT]


def test_failing_iterator_aborts_what_was_begun(peer: Peer, client: Daemon) -> None:
    """The caller's own error comes out, after the daemon was told."""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(TENSORS.items())[:3]
        raise OSError("the disk is gone")

    thread, outcome = in_background(client.refit, tensors(), SPECS)
    grant(peer)
    begin(peer)
    applied(peer.next(ApplyBucket))
    aborted = peer.next(AbortRefit)
    assert aborted.body.refit == 5
    aborted.reply(RefitAborted(refit=5, state=EngineState.TORN, version=3))
    thread.join()
    assert isinstance(outcome[0], OSError)


def test_refused_bucket_is_raised_and_aborted(peer: Peer, client: Daemon) -> None:
    """Even when the daemon has ended the refit by itself: its first error is the one that counts."""
    thread, outcome = in_background(client.refit, TENSORS)
    grant(peer)
    begin(peer)
    peer.next(ApplyBucket).fail(ErrorCode.REFIT_FAILED)
    peer.next(ApplyBucket)
    peer.next(AbortRefit).fail(ErrorCode.UNKNOWN_REFIT)
    thread.join()
    assert outcome[0].code is ErrorCode.REFIT_FAILED


def test_refused_begin_is_not_aborted(peer: Peer, client: Daemon) -> None:
    """There is nothing to abort; the next refit finds the role and the buckets as they were."""
    thread, outcome = in_background(client.refit, TENSORS)
    grant(peer)
    peer.next(BeginRefit).fail(ErrorCode.MANIFEST_MISMATCH)
    thread.join()
    assert outcome[0].code is ErrorCode.MANIFEST_MISMATCH
    thread, outcome = in_background(client.refit, TENSORS)
    peer.next(BeginRefit).fail(ErrorCode.MANIFEST_MISMATCH)
    thread.join()


def test_failure_to_pack_withdraws_a_begin_that_is_not_answered(
    peer: Peer, client: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where that is sent before the first bucket is packed: the role is given up with it."""
    has_begun = threading.Event()

    def pack(_plan: PackingPlan, _tensors: object) -> Iterator[FilledBucket]:
        assert has_begun.wait(30)
        raise OSError("no device")
        yield

    monkeypatch.setattr(PackingPlan, "ahead", 2)
    monkeypatch.setattr(PackingPlan, "pack", pack)
    thread, outcome = in_background(client.refit, TENSORS)
    grant(peer)
    peer.next(BeginRefit)
    has_begun.set()
    peer.next(ReleaseWriter).reply(WriterReleased())
    thread.join()
    assert isinstance(outcome[0], OSError)


def test_a_refit_after_fork_leaves_the_buckets_alone(peer: Peer, client: Daemon) -> None:
    """They are memory that the child shares with its parent, whose next refit may be being read."""
    thread, outcome = in_background(client.refit, {"a": torch.ones(16)})
    opened = grant(peer)
    begin(peer)
    finish_begun(peer, buckets=1)
    thread.join()
    assert outcome == [REPORT]
    bucket = Path(f"/proc/self/fd/{opened.segments[0].fd}")
    before = bucket.read_bytes()
    child = os.fork()
    if child == 0:
        try:
            client.refit({"a": torch.zeros(16)})
        except UsedAfterFork:
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bucket.read_bytes() == before


def test_no_tensors_at_all_is_an_error(client: Daemon, peer: Peer) -> None:
    """An empty dict or generator is a mistake in the caller, not a refit of nothing."""
    with pytest.raises(ValueError, match="not one tensor"):
        client.refit({})
    thread, outcome = in_background(client.refit, iter(()), [])
    peer.next(AcquireWriter).reply(WriterAcquired(epoch=7))
    thread.join()
    assert isinstance(outcome[0], ValueError)


class Interrupted(BaseException):
    """A KeyboardInterrupt would end the tests."""


@pytest.fixture
def leading(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first rank of a group; a real one's threads would get the signals of this process."""
    monkeypatch.setattr("refit_trainer.ranks.dist.is_initialized", lambda: True)
    monkeypatch.setattr("refit_trainer.ranks.dist.get_rank", lambda: 0)
    monkeypatch.setattr("refit_trainer.ranks._told", lambda terms, _device: terms)


def of_ranks(daemon: AsyncDaemon) -> Steps[RefitReport]:
    shared = shared_module(share_parameters(torch.nn.Linear(2, 2)))
    assert shared is not None
    return daemon._ranked().refit(shared, {})


@pytest.mark.parametrize(
    "begin", [lambda daemon: daemon.refit_steps(iter(TENSORS.items()), SPECS, {}), of_ranks], ids=["one", "ranks"]
)
def test_an_interrupt_just_after_the_role_came_leaves_it(
    peer: Peer, leading: None, begin: Callable[[AsyncDaemon], Steps[RefitReport]]
) -> None:
    """As Ctrl-C on another thread does, between the role and the refit: the next refit does not wait for ever."""
    peer.answer = lambda asked: asked.reply(WriterAcquired(epoch=7))

    async def scene() -> None:
        async with AsyncDaemon.connect(peer.endpoint) as daemon:
            steps = begin(daemon)
            await next(steps)
            await steps.throw(Interrupted())
            with pytest.raises(Interrupted):
                next(steps)
            async with asyncio.timeout(30):
                await daemon.acquire_writer()

    asyncio.run(scene())


def test_an_interrupt_before_the_end_has_begun_leaves_the_role(peer: Peer) -> None:
    """A second Ctrl-C, or the first one while a refit ends that has failed: the next refit does not wait for ever."""
    peer.answer = lambda asked: asked.reply(WriterAcquired(epoch=7))

    async def scene() -> None:
        async with AsyncDaemon.connect(peer.endpoint) as daemon:
            steps = daemon.refit_steps(iter(TENSORS.items()), SPECS, {})
            await next(steps)
            steps.throw(Interrupted()).close()
            await steps.throw(Interrupted())
            with pytest.raises(Interrupted):
                next(steps)
            async with asyncio.timeout(30):
                await daemon.acquire_writer()

    asyncio.run(scene())


@pytest.mark.parametrize("weights", [TENSORS, list(TENSORS.items())], ids=["mapping", "iterator"])
def test_unknown_name_among_those_selected_is_refused(client: Daemon, weights: object) -> None:
    """As in place; a partial refit that leaves out what was asked for would pass for done. Nothing is asked for."""
    with pytest.raises(LayoutMismatch) as refused:
        client.refit(weights, SPECS, only=["a", "no.such.tensor"])
    assert refused.value.code is ErrorCode.MANIFEST_MISMATCH
    assert refused.value.details["unexpected"] == ["no.such.tensor"]


# --- what nobody waits for any more ---


@pytest.mark.parametrize("kind", ["buckets", "in place", "fleet"])
def test_interrupted_refit_is_ended_before_the_interrupt_goes_on(peer: Peer, client: Daemon, kind: str) -> None:
    """A begin or commit that waits at the gate has no number yet: with the writer's role it is withdrawn. Only then may
    the caller, who has caught the interrupt, write to its parameters again."""
    order = []

    def interrupt() -> None:
        answer_until(peer, BeginRefit if kind == "buckets" else CommitRefit)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        released = peer.next(ReleaseWriter)
        order.append("the daemon reads nothing any more")
        released.reply(WriterReleased())

    thread, failure = in_background(interrupt)
    weights = TENSORS if kind == "buckets" else share_parameters(torch.nn.Linear(2, 2))
    with Fleet.connect([peer.endpoint]) if kind == "fleet" else contextlib.nullcontext(client) as refits:
        with pytest.raises(KeyboardInterrupt):
            refits.refit(weights)
        order.append("interrupted")
        thread.join()
    assert (order, failure) == (["the daemon reads nothing any more", "interrupted"], [None])


@pytest.mark.parametrize(
    ("work", "command"),
    [
        (lambda client: client.refit(TENSORS), BeginRefit),
        (lambda client: client.refit(share_parameters(torch.nn.Linear(2, 2))), CommitRefit),
        (lambda client: client.receive_refit(1, SPECS), BeginRefit),
        (lambda client: client.reload(), ReloadWeights),
    ],
)
def test_cancelled_refit_lets_go_of_the_role(peer: Peer, work: object, command: type[Request]) -> None:
    """Whatever the daemon has not answered ends with the role; the next refit takes it, and opens its sources, anew."""

    async def cancelled() -> None:
        async with AsyncDaemon.connect(peer.endpoint) as client:
            refit = asyncio.create_task(work(client))
            await asyncio.to_thread(answer_until, peer, command)
            refit.cancel()
            (await asyncio.to_thread(peer.next, ReleaseWriter)).reply(WriterReleased())
            with pytest.raises(asyncio.CancelledError):
                await refit
            again = asyncio.create_task(work(client))
            await asyncio.to_thread(answer_until, peer, command)
            again.cancel()
            (await asyncio.to_thread(peer.next, ReleaseWriter)).reply(WriterReleased())
            await asyncio.wait({again})

    asyncio.run(cancelled())


def test_a_role_is_given_up_before_it_is_taken_anew(peer: Peer) -> None:
    """Also after a second cancellation: what the daemon gave up later would be the new one, under a refit."""

    async def scene() -> None:
        async with AsyncDaemon.connect(peer.endpoint) as client:
            refit = asyncio.create_task(client.refit(TENSORS))
            await asyncio.to_thread(answer_until, peer, BeginRefit)
            refit.cancel()
            await asyncio.to_thread(peer.next, ReleaseWriter)
            refit.cancel()
            await asyncio.wait({refit})
            again = asyncio.create_task(client.refit(TENSORS))
            (await asyncio.to_thread(peer.next, ReleaseWriter)).reply(WriterReleased())
            await asyncio.to_thread(answer_until, peer, BeginRefit, RefitBegan(refit=5, version=4))
            await asyncio.to_thread(finish_begun, peer, 1)
            assert await again == REPORT

    asyncio.run(scene())


def test_a_second_cancellation_does_not_keep_the_abort_from_the_daemon(peer: Peer) -> None:
    """Whenever it comes: the gate would stay shut until the deadline."""

    async def cancelled_twice(client: AsyncDaemon, turns: int) -> None:
        refit = asyncio.create_task(client.refit(TENSORS))
        await asyncio.to_thread(answer_until, peer, BeginRefit, RefitBegan(refit=5, version=4))
        await asyncio.to_thread(peer.next, ApplyBucket)
        await asyncio.to_thread(peer.next, ApplyBucket)
        refit.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        refit.cancel()
        (await asyncio.to_thread(peer.next, AbortRefit)).reply(
            RefitAborted(refit=5, state=EngineState.READY, version=3)
        )
        await asyncio.wait({refit})
        assert refit.cancelled()

    async def scene() -> None:
        async with AsyncDaemon.connect(peer.endpoint, bucket_bytes=128) as client:
            for turns in range(8):
                await cancelled_twice(client, turns)

    asyncio.run(scene())


@pytest.mark.parametrize(("only", "names"), [(None, ["a", "b"]), (["b"], ["b"])])
def test_who_only_receives_announces_as_who_sends(peer: Peer, only: list[str] | None, names: list[str]) -> None:
    """Specs as people write them become those of the wire, of the tensors that are to come."""
    as_written = [
        TensorShape(name="a", dtype=torch.float32, shape=[4, 3]),  # type: ignore[arg-type]
        TensorShape(name="b", dtype="float32", shape=torch.Size([5])),  # type: ignore[arg-type]
    ]
    expected = layout_of([("a", torch.ones(4, 3)), ("b", torch.ones(5))])

    def answer() -> BeginRefit:
        peer.next(AcquireWriter).reply(WriterAcquired(epoch=7))
        begun = begin(peer)
        peer.next(ReceiveBroadcast).reply(BroadcastReceived(refit=5, size_bytes=1))
        peer.next(FinishRefit).reply(RefitCommitted(report=REPORT))
        return begun

    async def received() -> BeginRefit:
        async with AsyncDaemon.connect(peer.endpoint) as client:
            report, begun = await asyncio.gather(
                client.receive_refit(1, as_written, only=only), asyncio.to_thread(answer)
            )
            assert report == REPORT
            return begun

    begun = asyncio.run(received())
    assert begun.tensors == [expected[name] for name in names]
    assert begun.partial == (only is not None)


def answer_until(peer: Peer, command: type[Request], answer: Reply | None = None) -> None:
    """Answers whatever comes before `command`, and that with `answer`."""
    while not isinstance((asked := peer.next()).body, command):
        answers = {
            GetStatus: STATUS,
            ReleaseWriter: WriterReleased(),
            AcquireWriter: WriterAcquired(epoch=7),
            OpenSource: SourceOpened(source=1, path="plan", tensors=1, size_bytes=1, unplanned=[]),
            ValidateRefit: RefitValidated(version=4, path="plan", restorable_version=3, milliseconds=0.1),
        }
        asked.reply(answers[type(asked.body)])
    if answer is not None:
        asked.reply(answer)


def test_connection_that_breaks_before_the_answer_ends_the_refit(peer: Peer, client: Daemon) -> None:
    """The session lives on, and what it had begun with it: it is ended as soon as the daemon can be asked again."""
    thread, outcome = in_background(client.refit, TENSORS)
    grant(peer)
    peer.next(BeginRefit)
    peer.stop()
    peer.start()
    peer.next(ReleaseWriter).reply(WriterReleased())
    thread.join()
    assert isinstance(outcome[0], DaemonUnreachable)


@pytest.mark.timeout(60)
def test_a_daemon_that_is_gone_ends_a_refit_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that was noticed before the next bucket: nobody waits for it as long as a refit may take."""
    monkeypatch.setattr(one_refit, "RECONNECT_SECONDS", 0.2)
    monkeypatch.setattr(writer, "RECONNECT_SECONDS", 0.2)
    answered = threading.Event()
    with running(Peer(endpoint_in(tmp_path))) as peer:
        with Daemon.connect(peer.endpoint, bucket_bytes=128, timeout_seconds=1.0) as client:

            def tensors() -> Iterator[tuple[str, torch.Tensor]]:
                yield from list(TENSORS.items())[:3]
                answered.wait()
                peer.stop()
                with pytest.raises(DaemonUnreachable):
                    client.status()
                yield from list(TENSORS.items())[3:]

            thread, outcome = in_background(client.refit, tensors(), SPECS)
            grant(peer)
            begin(peer)
            applied(peer.next(ApplyBucket))
            answered.set()
            thread.join()
            assert isinstance(outcome[0], DaemonUnreachable)
        peer.start()


def test_tensors_are_announced_anew_after_a_begin_that_failed(peer: Peer, client: Daemon) -> None:
    """What the daemon knows of the last announcement is certain only after a begin that it has answered."""
    fewer = dict(list(TENSORS.items())[:3])
    thread, _ = in_background(client.refit, fewer)
    grant(peer)
    begin(peer)
    finish_begun(peer, buckets=2)
    thread.join()
    refused, _ = in_background(client.refit, dict(list(TENSORS.items())[3:]))
    peer.next(BeginRefit).fail(ErrorCode.MANIFEST_MISMATCH)
    refused.join()
    for again in (False, True):
        thread, outcome = in_background(client.refit, fewer)
        begun = begin(peer)
        assert (begun.again, [tensor.name for tensor in begun.tensors]) == (again, [] if again else [*fewer])
        finish_begun(peer, buckets=2)
        thread.join()
        assert outcome == [REPORT]
