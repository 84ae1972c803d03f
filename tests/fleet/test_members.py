"""What a member is to its fleet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from refit_protocol.messages import Status
from refit_protocol.states import EngineState
from refit_trainer import (
    AsyncFleet,
    ClientClosed,
    DaemonUnreachable,
    Fleet,
    FleetStatus,
    MemberState,
    NoMember,
    Sampling,
)
from refit_trainer.fleet.members import judged, newest
from tests.fleet.conftest import directory_in
from tests.fleet.test_turns import settled
from tests.server.small_daemon import SmallDaemon, small_daemon

GONE = DaemonUnreachable("gone")


@pytest.fixture
def status(small_daemons: list[SmallDaemon]) -> Status:
    """Of a daemon that serves version 3."""
    return msgspec.structs.replace(small_daemons[0].in_loop(small_daemons[0].status), version=3)


def test_judgements(status: Status) -> None:
    def state(version: int, engine: EngineState = EngineState.READY, *, left_out: bool = False) -> MemberState:
        seen = msgspec.structs.replace(status, state=engine)
        return judged("a", seen, version, left_out=left_out).state

    assert state(3) is MemberState.SERVING
    assert state(3, EngineState.REFITTING) is MemberState.SERVING
    assert state(3, EngineState.RESTORING) is MemberState.SERVING
    assert state(4) is MemberState.BEHIND
    assert state(3, left_out=True) is MemberState.LEFT_OUT
    for engine in (EngineState.TORN, EngineState.ASLEEP, EngineState.LOADING, EngineState.DRAINING, EngineState.DEAD):
        assert state(4, engine) is MemberState.NOT_SERVABLE
    assert judged("a", GONE, 3, left_out=False).state is MemberState.DOWN


def test_newest_is_of_those_that_can_generate(status: Status) -> None:
    torn = msgspec.structs.replace(status, version=9, state=EngineState.TORN)
    assert newest([status, torn, GONE]) == 3
    assert newest([torn, GONE]) is None


def test_digests_agree_only_where_they_are_equal(status: Status) -> None:
    """Of those that serve; what is behind may hold anything."""

    def fleet(*digests: str | None) -> FleetStatus:
        answers = [msgspec.structs.replace(status, digest=digest) for digest in digests]
        behind = msgspec.structs.replace(status, version=1, digest="other")
        members = [judged(str(n), answer, 3, left_out=False) for n, answer in enumerate([*answers, behind])]
        return FleetStatus(version=3, members=members)

    assert fleet("a", "a").digests_agree
    assert not fleet("a", "b").digests_agree


def test_one_that_is_down_is_reported_and_joins_when_it_is_there(small_daemons: list[SmallDaemon]) -> None:
    """A fleet is there as soon as one daemon is; without any, the reasons are told."""
    missing = small_daemons[0].endpoint + "-not-there"
    with Fleet.connect([small_daemons[0].endpoint, missing], 2.0, probe_seconds=2.0) as fleet:
        members = fleet.status().members
        assert [member.state for member in members] == [MemberState.SERVING, MemberState.DOWN]
        assert isinstance(members[1].error, DaemonUnreachable)
    with pytest.raises(NoMember, match="does not exist"):
        Fleet.connect([missing], 0.5)


def test_one_that_comes_late_takes_part_by_itself(small_daemons: list[SmallDaemon], tmp_path: Path) -> None:
    """Nobody has to ask for the fleet's status first: whatever is done next counts it in."""
    directory = directory_in(tmp_path, 9)
    first = small_daemons[0]
    endpoints = [first.endpoint, f"ipc://{directory}/s"]
    with Fleet.connect(endpoints, 2.0, probe_seconds=60.0) as fleet, small_daemon(directory) as late:
        member = fleet._fleet._members[late.endpoint]
        late.until(lambda: member.is_up)
        samples = fleet.generate([[number] for number in range(40)], Sampling(max_tokens=1))
        late.until(lambda: len(first.engine.running) + len(late.engine.running) == 40)
        assert late.engine.running
        for daemon in (first, late):
            daemon.step()
        assert len(list(samples)) == 40


def test_the_version_of_one_that_is_left_out_is_not_the_fleets(small_daemons: list[SmallDaemon]) -> None:
    """It may have been refitted by others; those that take part are not behind it."""
    endpoints = [daemon.endpoint for daemon in small_daemons]
    with Fleet.connect(endpoints) as fleet:
        fleet.leave_out(endpoints[0])
        small_daemons[0].in_loop(lambda: setattr(small_daemons[0].gate, "version", 9))
        status = fleet.status()
        assert (status.version, status.serving) == (0, endpoints[1:])


@pytest.mark.parametrize("endpoints", [[], ["ipc:///tmp/a", "ipc:///tmp/a"]])
def test_a_fleet_is_of_different_daemons(endpoints: list[str]) -> None:
    with pytest.raises(ValueError, match="each once"):
        Fleet.connect(endpoints)


def test_asynchronous_face(small_daemons: list[SmallDaemon]) -> None:
    """The same on the caller's own loop."""

    async def scene() -> list[MemberState]:
        async with AsyncFleet.connect([daemon.endpoint for daemon in small_daemons]) as fleet:
            return [member.state for member in (await fleet.status()).members]

    assert asyncio.run(scene()) == [MemberState.SERVING] * 3


def test_a_fleet_that_was_closed_says_so(small_daemons: list[SmallDaemon]) -> None:
    """To what is asked afterwards as to who waits meanwhile for a daemon that never came: nobody is cancelled by it."""
    first = small_daemons[0].endpoint

    async def scene() -> None:
        fleet = await AsyncFleet.connect([first, first + "-not-there"], 2.0, probe_seconds=60.0)
        looking = asyncio.create_task(fleet.status())
        await settled()
        await fleet.close()
        assert [member.state for member in (await looking).members][1] is MemberState.DOWN
        with pytest.raises(ClientClosed):
            await fleet.status()
        with pytest.raises(ClientClosed):
            await fleet.acquire_writer()
        with pytest.raises(ClientClosed):
            await fleet.refit({})
        with pytest.raises(ClientClosed):
            await anext(fleet.generate([[1]]))

    asyncio.run(scene())
