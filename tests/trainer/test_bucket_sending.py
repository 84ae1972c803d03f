"""Buckets as the daemon sees them: in which order they come, what is said of them, and how soon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AbortRefit,
    ApplyBucket,
    BeginRefit,
    FinishRefit,
    GetManifest,
    Manifest,
    RefitAborted,
    RefitBegan,
    RefitCommitted,
    ReleaseWriter,
    WriterReleased,
)
from refit_protocol.states import EngineState
from refit_trainer import (
    AsyncDaemon,
    Daemon,
    DaemonRestarted,
)
from refit_trainer.packing_plan import PackingPlan
from tests.trainer.background import in_background
from tests.trainer.granted import REPORT, SPECS, TENSORS, applied, begin, finish_begun, grant
from tests.trainer.peer import Peer


@pytest.fixture
def client(peer: Peer) -> Iterator[Daemon]:
    """With buckets that hold two of `TENSORS` each."""
    with Daemon.connect(peer.endpoint, bucket_bytes=128) as connected:
        yield connected


def test_bucket_is_packed_while_the_other_is_read(peer: Peer, client: Daemon) -> None:
    """Two buckets are on their way at once, never three: none is overwritten before it has been read."""
    thread, outcome = in_background(client.refit, TENSORS)
    opened = grant(peer)
    assert (opened.kind, len(opened.segments), opened.segments[0].size_bytes) == ("bucket", 2, 128)
    assert [tensor.name for tensor in begin(peer).tensors] == [*TENSORS]
    first, second = peer.next(ApplyBucket), peer.next(ApplyBucket)
    assert [piece.name for piece in first.body.pieces + second.body.pieces] == [*"abcd"]
    looking, _ = in_background(client.manifest)
    peer.next(GetManifest).reply(Manifest(tensors=[]))
    looking.join()
    applied(first)
    third = peer.next(ApplyBucket)
    assert [first.body.bucket, second.body.bucket, third.body.bucket] == [0, 1, 0]
    applied(second)
    applied(third)
    peer.next(FinishRefit).reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [REPORT]


def test_the_end_is_asked_for_behind_the_last_bucket(peer: Peer, client: Daemon) -> None:
    """Neither that one nor the one before is answered yet; the refit has ended when all of it is."""
    thread, outcome = in_background(client.refit, {name: TENSORS[name] for name in "abcd"})
    grant(peer)
    begin(peer)
    first, last, end = peer.next(ApplyBucket), peer.next(ApplyBucket), peer.next(FinishRefit)
    applied(first)
    applied(last)
    end.reply(RefitCommitted(report=REPORT))
    thread.join()
    assert outcome == [REPORT]


def test_what_a_last_bucket_was_refused_with_is_raised(peer: Peer, client: Daemon) -> None:
    """Not what the end behind it was refused with, though that comes first."""
    thread, outcome = in_background(client.refit, iter({name: TENSORS[name] for name in "abcd"}.items()), SPECS[:4])
    grant(peer)
    begin(peer)
    first, last, end = peer.next(ApplyBucket), peer.next(ApplyBucket), peer.next(FinishRefit)
    end.fail(ErrorCode.UNKNOWN_REFIT)
    applied(first)
    last.fail(ErrorCode.REFIT_FAILED)
    peer.next(AbortRefit).fail(ErrorCode.UNKNOWN_REFIT)
    thread.join()
    assert outcome[0].code is ErrorCode.REFIT_FAILED


def test_a_restart_before_the_last_bucket_is_what_is_raised(peer: Peer, client: Daemon) -> None:
    """Though the bucket before it has failed with the connection: that another daemon serves is told only once."""
    restarted = threading.Event()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(TENSORS.items())[:3]
        assert restarted.wait(30)
        yield "d", TENSORS["d"]

    thread, outcome = in_background(client.refit, tensors(), SPECS[:4])
    grant(peer)
    begin(peer)
    peer.next(ApplyBucket)
    peer.stop()
    peer.epoch = 2
    peer.answer = lambda asked: asked.fail(ErrorCode.NO_SESSION)
    peer.start()
    peer.wait_for_hellos(2)
    restarted.set()
    thread.join()
    assert isinstance(outcome[0], DaemonRestarted)


@pytest.mark.parametrize("ahead", [1, 2])
def test_buckets_whose_refit_may_still_end_are_left_alone(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """The end may be waiting behind a bucket that is still to be read, and nobody has said that it was aborted: the
    next refit asks for that before it packs anything, also where it is like the last one."""
    monkeypatch.setattr(PackingPlan, "ahead", ahead)
    weights = {name: TENSORS[name] for name in "abcd"}

    async def scene() -> None:
        async with AsyncDaemon.connect(peer.endpoint, bucket_bytes=128) as client:
            refit = asyncio.create_task(client.refit(weights))
            opened = await asyncio.to_thread(grant, peer)
            buckets = [Path(f"/proc/self/fd/{segment.fd}") for segment in opened.segments]
            await asyncio.to_thread(begin, peer)
            for command in (ApplyBucket, ApplyBucket, FinishRefit):
                await asyncio.to_thread(peer.next, command)
            refit.cancel()
            await asyncio.to_thread(peer.next, AbortRefit)
            refit.cancel()
            await asyncio.wait({refit})
            held = [bucket.read_bytes() for bucket in buckets]
            again = asyncio.create_task(client.refit({name: tensor + 1 for name, tensor in weights.items()}))
            released = await asyncio.to_thread(peer.next)
            assert [bucket.read_bytes() for bucket in buckets] == held
            assert isinstance(released.body, ReleaseWriter)
            released.reply(WriterReleased())
            await asyncio.to_thread(grant, peer)
            await asyncio.to_thread(begin, peer)
            await asyncio.to_thread(finish_begun, peer, 2)
            assert await again == REPORT

    asyncio.run(scene())


def test_first_buckets_are_sent_behind_a_begin_that_says_nothing_new(peer: Peer, client: Daemon) -> None:
    """Before its answer, so without the refit's number; where it is refused that is what is raised."""
    for answer in ("first", "again", "refused"):
        thread, outcome = in_background(client.refit, TENSORS)
        if answer == "first":
            grant(peer)
            begin(peer)
            first, numbered = peer.next(ApplyBucket), 5
        else:
            began, first, numbered = peer.next(BeginRefit), peer.next(ApplyBucket), None
        assert first.body.refit == numbered
        if answer == "refused":
            first.fail(ErrorCode.UNKNOWN_REFIT)
            began.fail(ErrorCode.DEADLINE_EXCEEDED)
            thread.join()
            assert outcome[0].code is ErrorCode.DEADLINE_EXCEEDED
            return
        if answer == "again":
            began.reply(RefitBegan(refit=5, version=4))
        applied(first)
        while isinstance((asked := peer.next()).body, ApplyBucket):
            assert asked.body.refit == 5
            applied(asked)
        asked.reply(RefitCommitted(report=REPORT))
        thread.join()
        assert outcome == [REPORT]


def test_a_begin_for_shapes_that_have_changed_is_aborted(
    peer: Peer, client: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where all shapes are looked at when it has been sent: no bucket follows, and the role is kept."""
    monkeypatch.setattr(PackingPlan, "ahead", 2)
    thread, outcome = in_background(client.refit, TENSORS)
    grant(peer)
    begin(peer)
    applied(peer.next(ApplyBucket))
    finish_begun(peer, buckets=2)
    thread.join()
    thread, outcome = in_background(client.refit, {**TENSORS, "f": torch.zeros(8)})
    assert begin(peer).again
    aborted = peer.next(AbortRefit)
    assert aborted.body.refit == 5
    aborted.reply(RefitAborted(refit=5, state=EngineState.READY, version=3))
    anew = begin(peer)
    assert (anew.again, anew.tensors[-1].shape) == (False, (8,))
    applied(peer.next(ApplyBucket))
    finish_begun(peer, buckets=2)
    thread.join()
    assert outcome == [REPORT]


def test_what_the_buckets_hold_is_said_once(peer: Peer, client: Daemon) -> None:
    """The next refit gives the numbers alone; where other tensors are announced, all of it again."""
    said: list[list[tuple[int | None, bool]]] = []
    for tensors in (TENSORS, TENSORS, {**TENSORS, "a": torch.zeros(8)}):
        thread, outcome = in_background(client.refit, tensors)
        if not said:
            grant(peer)
        said.append([])
        begin(peer)
        while isinstance((asked := peer.next()).body, ApplyBucket):
            said[-1].append((asked.body.layout, bool(asked.body.pieces)))
            applied(asked)
        asked.reply(RefitCommitted(report=REPORT))
        thread.join()
        assert outcome == [REPORT]
    numbers = range(3)
    assert said == [[(number, pieces) for number in numbers] for pieces in (True, False, True)]


def test_what_a_bucket_holds_is_said_again_after_an_answer_that_never_came(peer: Peer, client: Daemon) -> None:
    """The daemon may know its number for the pieces that it was told then, in another order than before."""

    def in_another_order() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(TENSORS.items())[::-1][:3]
        raise OSError("the disk is gone")

    thread, outcome = in_background(client.refit, iter(TENSORS.items()), SPECS)
    grant(peer)
    begin(peer)
    applied(peer.next(ApplyBucket))
    finish_begun(peer, buckets=2)
    thread.join()
    assert outcome == [REPORT]
    thread, outcome = in_background(client.refit, in_another_order(), SPECS)
    begin(peer)
    assert peer.next(ApplyBucket).body.pieces
    peer.next(AbortRefit).reply(RefitAborted(refit=5, state=EngineState.READY, version=3))
    thread.join()
    assert isinstance(outcome[0], OSError)
    thread, outcome = in_background(client.refit, iter(TENSORS.items()), SPECS)
    begin(peer)
    asked = peer.next(ApplyBucket)
    assert [piece.name for piece in asked.body.pieces] == ["a", "b"]
    applied(asked)
    finish_begun(peer, buckets=2)
    thread.join()
    assert outcome == [REPORT]
