"""Refit work and those who asked for it: what goes on without them, and what does not begin any more."""

from __future__ import annotations

import asyncio

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.commit import Ticket
from refitd.running import Running
from refitd.sessions import Session


def session(name: str) -> Session:
    return Session(name, name, None, 60.0, b"")


def ticket() -> Ticket:
    return Ticket(version=1, policy="keep", attest="sampled", check_finite=False, deadline_seconds=60.0, partial=False)


def test_work_goes_on_when_who_asked_is_gone() -> None:
    """It is not cancelled with them, and can still be waited for; afterwards nothing of it is kept."""

    async def run() -> None:
        running, may_end, ended = Running(), asyncio.Event(), asyncio.Event()

        async def work() -> None:
            await may_end.wait()
            ended.set()

        asked = asyncio.create_task(running.to_its_end(work()))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked})
        assert asked.cancelled()
        (left,) = running.tasks
        may_end.set()
        await left
        assert ended.is_set()
        await asyncio.sleep(0)
        assert not running.tasks

    asyncio.run(run())


def test_a_session_leaves_only_windows_of_its_own() -> None:
    """What waits for it is given up and waited for; another session's waits on."""

    async def run() -> None:
        running, until = Running(), asyncio.Event()
        owners = session("one"), session("other")
        tickets = ticket(), ticket()
        asked = [
            asyncio.create_task(running.in_window(owner, its, its.wait(until.wait())))  # type: ignore[arg-type]
            for owner, its in zip(owners, tickets, strict=True)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await running.leave_windows(owners[0], "its session ended")
        with pytest.raises(ProtocolError, match="its session ended") as refused:
            await asked[0]
        assert refused.value.code is ErrorCode.REFIT_FAILED
        assert [owner for owner, _ in running.windows.values()] == [owners[1]]
        until.set()
        await asked[1]
        assert not running.windows

    asyncio.run(run())
