"""Whose turn it is among the refits of one client, where one has said from its own thread that it comes next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest

from refit_protocol.messages import AcquireWriter, ReleaseWriter, WriterAcquired, WriterReleased
from refit_trainer import RequestTimedOut
from refit_trainer.connection import Connection, ConnectionOptions
from refit_trainer.writer import WriterRole
from tests.trainer.peer import Asked, Peer

EPOCH, BOUND_SECONDS = 7, 10.0

Other: TypeAlias = Callable[[WriterRole], Coroutine[Any, Any, None]]


def answer(asked: Asked) -> None:
    asked.reply({AcquireWriter: WriterAcquired(epoch=EPOCH), ReleaseWriter: WriterReleased()}[type(asked.body)])


@asynccontextmanager
async def role_at(peer: Peer) -> AsyncIterator[WriterRole]:
    peer.answer = answer
    connection = Connection(ConnectionOptions(peer.endpoint, "writer"))
    await connection.open(BOUND_SECONDS)
    try:
        yield WriterRole(connection, None)
    finally:
        await connection.close()


async def refit(role: WriterRole) -> None:
    async with role.writing(BOUND_SECONDS):
        pass


async def acquire(role: WriterRole) -> None:
    await role.acquire(takeover=True, timeout_seconds=BOUND_SECONDS)


async def release(role: WriterRole) -> None:
    await role.release(timeout_seconds=BOUND_SECONDS)


@pytest.mark.parametrize("other", [refit, acquire, release])
def test_whoever_has_claimed_it_is_the_next(peer: Peer, other: Other) -> None:
    """Though the other one comes before: the daemon may be waiting for what was claimed."""

    async def run() -> None:
        async with role_at(peer) as role:
            one = object()
            assert role.claim(one)
            coming = asyncio.create_task(other(role))
            await asyncio.sleep(0)
            await role.enter(BOUND_SECONDS, one)
            assert not coming.done()
            await role.leave()
            await coming

    asyncio.run(run())


def test_a_claim_is_over_once_it_was_entered_or_waived(peer: Peer) -> None:
    async def run() -> None:
        async with role_at(peer) as role:
            one, another = object(), object()
            assert role.claim(one)
            role.waive(another)
            assert not role.claim(another)
            role.waive(one)
            await refit(role)
            assert role.claim(one)
            await role.enter(BOUND_SECONDS, one)
            await role.leave()
            await refit(role)

    asyncio.run(run())


def test_it_cannot_be_claimed_while_it_is_entered(peer: Peer) -> None:
    """Nor does such a claim hold anybody up afterwards."""

    async def run() -> None:
        async with role_at(peer) as role:
            async with role.writing(BOUND_SECONDS):
                assert not role.claim(object())
            await refit(role)

    asyncio.run(run())


def test_a_turn_is_waited_for_no_longer_than_said(peer: Peer) -> None:
    """Whoever gives up leaves it to others."""

    async def run() -> None:
        async with role_at(peer) as role:
            async with role.writing(BOUND_SECONDS):
                for other in (role.enter(0.01), role.acquire(takeover=True, timeout_seconds=0.01)):
                    with pytest.raises(RequestTimedOut, match="another refit of this client"):
                        await other
            await refit(role)

    asyncio.run(run())
