"""Batches on three daemons whose engines step when the test says so: versions that move, prompts that move."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from refit_protocol.errors import ErrorCode
from refit_protocol.states import EngineEvent
from refit_trainer import (
    AsyncFleet,
    ClientClosed,
    Delta,
    Fleet,
    MemberLost,
    NoMember,
    OutputIncomplete,
    RefitdError,
    Sample,
    Sampling,
    VersionsMixed,
)
from refit_trainer.fleet.aio import FleetOptions
from refit_trainer.fleet.routing import Load
from refit_trainer.replies import AsyncReplies, Replies
from tests.server.small_daemon import SmallDaemon
from tests.trainer.wire import Wire, wire_to

# Which daemon gets which is a matter of hashes of paths: so many that none of the three is left without.
COUNT = 48
PROMPTS = [[number, 5, 6] for number in range(COUNT)]
TEN = Sampling(max_tokens=10)
OVER_A_WIRE: FleetOptions = {"probe_seconds": 60.0, "patience_seconds": 0.1}


@pytest.fixture
def fleet(small_daemons: list[SmallDaemon]) -> Iterator[Fleet]:
    with Fleet.connect([daemon.endpoint for daemon in small_daemons], probe_seconds=60.0) as connected:
        yield connected


def set_version(daemon: SmallDaemon, version: int) -> None:
    """As another trainer's refit under policy `keep` does."""

    def publish() -> None:
        daemon.gate.version = version

    daemon.in_loop(publish)


def arrived(daemons: list[SmallDaemon], outputs: int) -> None:
    """Until that many outputs run, on all together."""
    daemons[0].until(lambda: sum(len(daemon.engine.running) for daemon in daemons) == outputs)


def run_all(daemons: list[SmallDaemon]) -> None:
    for daemon in daemons:
        daemon.step(10)


def test_all_daemons_take_part_and_everything_comes_once(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """With the numbers of the batch, not of the daemons; counts and limits are those of the whole."""
    samples = fleet.generate(PROMPTS, Sampling(n=2, max_tokens=10))
    arrived(small_daemons, 2 * COUNT)
    assert all(daemon.engine.running for daemon in small_daemons)
    run_all(small_daemons)
    got = list(samples)
    assert sorted((s.prompt, s.output) for s in got) == [(p, o) for p in range(COUNT) for o in range(2)]
    assert all(sample.token_ids.tolist() == [*range(10)] for sample in got)
    assert samples.finished is not None
    assert (samples.finished.outputs, samples.finished.generated_tokens, samples.finished.prompt_tokens) == (
        2 * COUNT,
        20 * COUNT,
        3 * COUNT,
    )
    assert samples.resolved is not None
    assert samples.resolved.max_tokens == [10] * COUNT


def test_a_sample_of_another_version_is_made_again_elsewhere(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """One daemon's weights change under the batch: its outputs move to those that still serve the batch's version."""
    samples = fleet.generate(PROMPTS, TEN)
    arrived(small_daemons, COUNT)
    changed, *others = small_daemons
    moving = len(changed.engine.running)
    for daemon in small_daemons:
        daemon.step(3)
    set_version(changed, 1)
    for daemon in small_daemons:
        daemon.step(7)
    arrived(others, moving)
    assert not changed.engine.running
    run_all(others)
    got = list(samples)
    assert sorted(sample.prompt for sample in got) == [*range(COUNT)]
    assert {sample.version for sample in got} == {0}
    assert all(sample.token_ids.tolist() == [*range(10)] for sample in got)


def test_a_batch_whose_version_is_gone_says_so(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """All daemons changed: there is nobody left to make it again."""
    samples = fleet.generate(PROMPTS, TEN)
    arrived(small_daemons, COUNT)
    for daemon in small_daemons:
        daemon.step(3)
        set_version(daemon, 1)
        daemon.step(7)
    with pytest.raises(VersionsMixed) as mixed:
        list(samples)
    assert mixed.value.details["version"] == 0
    assert mixed.value.retryable


def test_a_stream_of_another_version_ends_at_once(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """Tokens that were delivered cannot be taken back."""
    deltas = fleet.stream(PROMPTS, TEN)
    arrived(small_daemons, COUNT)
    for daemon in small_daemons:
        daemon.step(3)
    set_version(small_daemons[1], 1)
    small_daemons[1].step(1)
    with pytest.raises(VersionsMixed):
        list(deltas)


def test_versions_may_be_mixed_where_that_is_allowed(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """Every daemon serves its part with what it has, and every sample says what that was."""
    set_version(small_daemons[1], 1)
    samples = fleet.generate(PROMPTS, TEN, allow_mixed_versions=True)
    arrived(small_daemons, COUNT)
    run_all(small_daemons)
    assert {sample.version for sample in samples} == {0, 1}


def test_a_batch_is_of_the_newest_version(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """Those that are behind get none of it; a version that nobody serves yet is refused, as is going back."""
    set_version(small_daemons[1], 4)
    samples = fleet.generate(PROMPTS, TEN)
    arrived(small_daemons[1:2], COUNT)
    run_all(small_daemons)
    assert {sample.version for sample in samples} == {4}
    with pytest.raises(RefitdError) as early:
        list(fleet.generate(PROMPTS, TEN, min_version=5))
    assert early.value.code is ErrorCode.VERSION_UNAVAILABLE
    set_version(small_daemons[1], 0)
    with pytest.raises(NoMember, match="version 4"):
        list(fleet.generate(PROMPTS, TEN))


def test_what_cannot_serve_gets_nothing(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """Neither a daemon that drains nor one that the caller left out."""
    small_daemons[0].in_loop(lambda: small_daemons[0].gate.step(EngineEvent.DRAIN_STARTED))
    fleet.leave_out(small_daemons[1].endpoint)
    samples = fleet.generate(PROMPTS, TEN)
    arrived(small_daemons[2:], COUNT)
    run_all(small_daemons[2:])
    assert len(list(samples)) == COUNT
    fleet.leave_out(small_daemons[2].endpoint)
    with pytest.raises(NoMember):
        list(fleet.generate(PROMPTS, TEN))


def test_cancelled_outputs_end_with_what_they_have(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """Nothing is asked for again."""
    samples = fleet.generate(PROMPTS, TEN)
    arrived(small_daemons, COUNT)
    for daemon in small_daemons:
        daemon.step(3)
    samples.cancel()
    got = list(samples)
    assert {(sample.finish_reason, len(sample.token_ids)) for sample in got} == {("cancelled", 3)}
    arrived(small_daemons, 0)


def test_what_a_daemons_end_cut_off_is_made_elsewhere(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """Whole, and in its place: nothing is to be raised."""
    samples = fleet.generate(PROMPTS, TEN)
    arrived(small_daemons, COUNT)
    end(small_daemons[0], ErrorCode.DRAINING)
    arrived(small_daemons[1:], COUNT)
    run_all(small_daemons[1:])
    assert sorted(sample.prompt for sample in samples if sample.complete) == [*range(COUNT)]


def test_what_a_refit_cut_off_is_raised(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """Policy `abort` is somebody's wish, which moving would undo; the other daemons' work is given up."""
    samples = fleet.generate(PROMPTS, TEN)
    arrived(small_daemons, COUNT)
    ended = len(small_daemons[0].engine.running)
    small_daemons[0].step(3)
    abort(small_daemons[0], ErrorCode.ABORTED)
    with pytest.raises(OutputIncomplete) as raised:
        list(samples)
    assert raised.value.code is ErrorCode.ABORTED
    assert {len(sample.token_ids) for sample in raised.value.samples} == {3}
    assert len(raised.value.samples) <= ended
    arrived(small_daemons, 0)


def test_a_stream_without_a_token_is_made_elsewhere(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """Where a daemon says that it ends, as where it is gone: nothing was delivered yet, and nothing is raised."""
    deltas = fleet.stream(PROMPTS, TEN)
    arrived(small_daemons, COUNT)
    end(small_daemons[0], ErrorCode.DRAINING)
    arrived(small_daemons[1:], COUNT)
    run_all(small_daemons[1:])
    assert whole_outputs(list(deltas)) == {*range(COUNT)}


def test_a_stream_in_the_middle_ends_behind_all_else(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """Of a daemon that ends, what has not begun is made elsewhere; nothing of what has begun is told twice, or taken
    for whole: the error names it.
    """
    deltas = fleet.stream(PROMPTS, TEN)
    arrived(small_daemons, COUNT)
    begun = step_half(small_daemons[0], 3)
    end(small_daemons[0], ErrorCode.ENGINE_DEAD)
    arrived(small_daemons[1:], COUNT - begun)
    run_all(small_daemons[1:])
    got, lost = read_until_lost(deltas)
    assert lost.code is ErrorCode.ENGINE_DEAD
    assert lost.details["endpoint"] == small_daemons[0].endpoint
    cut_off = {*lost.details["prompts"]}
    assert len(cut_off) == begun
    assert whole_outputs([delta for delta in got if delta.prompt not in cut_off]) == {*range(COUNT)} - cut_off
    assert {prompt: tokens_of(got, prompt) for prompt in cut_off} == {prompt: [0, 1, 2] for prompt in cut_off}


def test_a_stream_that_yields_the_incomplete_has_an_end_of_each(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """Of those that a daemon ended in the middle, too, with its reason: nothing is raised."""
    deltas = fleet.stream(PROMPTS, TEN, incomplete="yield")
    arrived(small_daemons, COUNT)
    begun = step_half(small_daemons[0], 3)
    end(small_daemons[0], ErrorCode.ENGINE_DEAD)
    arrived(small_daemons[1:], COUNT - begun)
    run_all(small_daemons[1:])
    got = list(deltas)
    ends = [delta for delta in got if delta.finish_reason is not None]
    assert sorted(delta.prompt for delta in ends) == [*range(COUNT)]
    cut_off = {delta.prompt for delta in ends if delta.error is ErrorCode.ENGINE_DEAD}
    assert len(cut_off) == begun
    assert whole_outputs([delta for delta in got if delta.prompt not in cut_off]) == {*range(COUNT)} - cut_off


def test_all_daemons_that_end_under_a_stream_are_told_together(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    """Whoever asks for the prompts of the error again has then all of them."""
    deltas = fleet.stream(PROMPTS, TEN)
    arrived(small_daemons, COUNT)
    left = len(small_daemons[2].engine.running)
    for daemon in small_daemons:
        daemon.step(3)
    for daemon in small_daemons[:2]:
        end(daemon, ErrorCode.DRAINING)
    run_all(small_daemons[2:])
    got, lost = read_until_lost(deltas)
    finished = {delta.prompt for delta in got if delta.finish_reason is not None}
    assert len(finished) == left
    assert {*lost.details["prompts"]} == {*range(COUNT)} - finished


def test_a_lost_daemons_stream_is_made_elsewhere_unless_it_has_begun(
    small_daemons: list[SmallDaemon], tmp_path: Path
) -> None:
    """The same for one whose connection is gone, and who says nothing."""
    with wire_to(small_daemons[0], tmp_path / "w") as wire, over(wire, small_daemons) as fleet:
        deltas = fleet.stream(PROMPTS, TEN, incomplete="yield")
        arrived(small_daemons, COUNT)
        begun = step_half(small_daemons[0], 3)
        read = [next(deltas) for _ in range(begun)]
        close(wire, small_daemons[0])
        arrived(small_daemons[1:], COUNT - begun)
        run_all(small_daemons[1:])
        got, lost = read_until_lost(deltas)
        cut_off = {*lost.details["prompts"]}
        assert cut_off == {delta.prompt for delta in read}
        assert whole_outputs(got) == {*range(COUNT)} - cut_off


def test_what_was_cancelled_has_its_end_though_its_daemon_is_lost(
    small_daemons: list[SmallDaemon], tmp_path: Path
) -> None:
    """From another daemon: nothing is made there, and nothing left out in silence."""

    async def scene(wire: Wire) -> list[Sample]:
        async with AsyncFleet.connect(endpoints_over(wire, small_daemons), **OVER_A_WIRE) as fleet:
            samples = fleet.generate(PROMPTS, TEN)
            reading = asyncio.create_task(_read(samples))
            await asyncio.to_thread(arrived, small_daemons, COUNT)
            # This loop stands still meanwhile: it sees the end of the wire when the cancellation is under way.
            close(wire, small_daemons[0])
            await samples.cancel()
            return await reading

    with wire_to(small_daemons[0], tmp_path / "w") as wire:
        got = asyncio.run(scene(wire))
    assert sorted(sample.prompt for sample in got) == [*range(COUNT)]
    assert {(sample.finish_reason, sample.error) for sample in got} == {("cancelled", None)}
    arrived(small_daemons[1:], 0)


def drain_all(daemons: list[SmallDaemon]) -> None:
    """Before any of them says so to whom it serves: there is nobody else to go to then."""
    for daemon in daemons:
        daemon.in_loop(lambda gate=daemon.gate: gate.step(EngineEvent.DRAIN_STARTED))
    for daemon in daemons:
        abort(daemon, ErrorCode.DRAINING)


@pytest.mark.parametrize("kind", ["generate", "stream"])
def test_what_nobody_else_makes_comes_as_far_as_it_came(
    fleet: Fleet, small_daemons: list[SmallDaemon], kind: str
) -> None:
    """With `incomplete="yield"` as from one daemon: every output has an end, and its reason."""
    got = (fleet.generate if kind == "generate" else fleet.stream)(PROMPTS, TEN, incomplete="yield")
    arrived(small_daemons, COUNT)
    for daemon in small_daemons:
        daemon.step(3 if kind == "generate" else 0)
    drain_all(small_daemons)
    ends = [each for each in got if each.finish_reason is not None]
    assert sorted(end.prompt for end in ends) == [*range(COUNT)]
    assert {end.error for end in ends} == {ErrorCode.DRAINING}
    assert {len(end.token_ids) for end in ends} == {3 if kind == "generate" else 0}


def test_what_nobody_else_makes_is_raised_with_what_there_is(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    samples = fleet.generate(PROMPTS, TEN)
    arrived(small_daemons, COUNT)
    for daemon in small_daemons:
        daemon.step(3)
    drain_all(small_daemons)
    with pytest.raises(OutputIncomplete) as raised:
        list(samples)
    assert raised.value.code is ErrorCode.DRAINING
    assert {len(sample.token_ids) for sample in raised.value.samples} == {3}


def whole_outputs(deltas: list[Delta]) -> set[int]:
    """The prompts of the deltas, each of which have all tokens once, in order, and an end."""
    prompts = {delta.prompt for delta in deltas}
    for prompt in prompts:
        mine = [delta for delta in deltas if delta.prompt == prompt]
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + ["length"]
        assert tokens_of(deltas, prompt) == [*range(10)]
    return prompts


def tokens_of(deltas: list[Delta], prompt: int) -> list[int]:
    return [token for delta in deltas if delta.prompt == prompt for token in delta.token_ids.tolist()]


def read_until_lost(deltas: Replies[Delta]) -> tuple[list[Delta], MemberLost]:
    got: list[Delta] = []
    with pytest.raises(MemberLost) as lost:
        got.extend(deltas)
    return got, lost.value


def step_half(daemon: SmallDaemon, tokens: int) -> int:
    """Every other running output, of which there are so many, gets so many tokens."""

    def step() -> int:
        engine = daemon.engine
        resting = dict([*engine.running.items()][::2])
        engine.running = {key: done for key, done in engine.running.items() if key not in resting}
        stepped = len(engine.running)
        engine.step(tokens)
        engine.running |= resting
        return stepped

    return daemon.in_loop(step)


def end(daemon: SmallDaemon, error: ErrorCode) -> None:
    """As a daemon ends: it serves nothing new, and says so to everybody whom it serves."""
    daemon.in_loop(lambda: daemon.gate.step(EngineEvent.DRAIN_STARTED))
    abort(daemon, error)


def endpoints_over(wire: Wire, daemons: list[SmallDaemon]) -> list[str]:
    """The first of them over the wire."""
    return [wire.endpoint, *(daemon.endpoint for daemon in daemons[1:])]


def over(wire: Wire, daemons: list[SmallDaemon]) -> Fleet:
    return Fleet.connect(endpoints_over(wire, daemons), **OVER_A_WIRE)


def close(wire: Wire, daemon: SmallDaemon) -> None:
    asyncio.run_coroutine_threadsafe(wire.close(), daemon.loop).result(timeout=60)


def abort(daemon: SmallDaemon, error: ErrorCode) -> None:
    asyncio.run_coroutine_threadsafe(daemon.generation.abort_all(error), daemon.loop).result(timeout=60)


def test_what_waits_for_its_turn_is_cancelled_too(small_daemons: list[SmallDaemon]) -> None:
    """No daemon has been asked for any of it when the cancellation comes; it ends as if all had been."""

    async def scene() -> set[tuple[str, ErrorCode | None]]:
        async with AsyncFleet.connect([daemon.endpoint for daemon in small_daemons], probe_seconds=60.0) as fleet:
            async with fleet._turns.refit(60):
                samples = fleet.generate(PROMPTS, TEN, deadline_seconds=20.0)
                reading = asyncio.create_task(_read(samples))
                while not fleet.batches._running:  # noqa: ASYNC110 - begun by the reader, who tells nobody
                    await asyncio.sleep(0)
                await fleet.cancel()
            return {(sample.finish_reason, sample.error) for sample in await reading}

    assert asyncio.run(scene()) == {("cancelled", None)}
    arrived(small_daemons, 0)


async def _read(samples: AsyncReplies[Sample]) -> list[Sample]:
    return [sample async for sample in samples]


def test_a_batch_that_the_end_of_its_fleet_forestalls_says_so(small_daemons: list[SmallDaemon]) -> None:
    """Closed in the very turn of the loop in which it was started: its reader does not wait for ever."""

    async def scene() -> None:
        fleet = await AsyncFleet.connect([daemon.endpoint for daemon in small_daemons])
        reading = asyncio.create_task(_read(fleet.generate(PROMPTS, TEN)))
        await asyncio.create_task(fleet.close())
        with pytest.raises(ClientClosed):
            async with asyncio.timeout(30):
                await reading

    asyncio.run(scene())


def test_what_no_daemon_was_asked_for_is_no_load(
    fleet: Fleet, small_daemons: list[SmallDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon's share may be cancelled before its task has begun, as by the failure of another one."""
    create_task = asyncio.TaskGroup.create_task

    def create_cancelled(group: asyncio.TaskGroup, work: Any) -> asyncio.Task[Any]:
        task = create_task(group, work)
        task.cancel()
        return task

    monkeypatch.setattr(asyncio.TaskGroup, "create_task", create_cancelled)
    with pytest.raises(RefitdError):
        list(fleet.generate(PROMPTS, TEN))
    router = fleet._fleet.batches._router
    assert [router.load(daemon.endpoint) for daemon in small_daemons] == [Load()] * 3


def test_an_iterator_that_is_dropped_leaves_the_engines(fleet: Fleet, small_daemons: list[SmallDaemon]) -> None:
    with fleet.generate(PROMPTS, TEN):
        arrived(small_daemons, COUNT)
    arrived(small_daemons, 0)


def test_a_clients_mistake_is_told_as_by_one_daemon(fleet: Fleet) -> None:
    """No other daemon is asked for what no daemon can do."""
    with pytest.raises(RefitdError) as invalid:
        list(fleet.generate([*PROMPTS, [10**6]], TEN))
    assert invalid.value.code is ErrorCode.INVALID_PROMPT
    assert invalid.value.details["prompt"] == len(PROMPTS)
    with pytest.raises(RefitdError) as nothing:
        list(fleet.generate([], TEN))
    assert nothing.value.code is ErrorCode.INVALID_PROMPT
    with pytest.raises(ValueError, match="groups"):
        fleet.generate(PROMPTS, TEN, groups=[1])
    with pytest.raises(TypeError):
        fleet.generate("text", TEN)
