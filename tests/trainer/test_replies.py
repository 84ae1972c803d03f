from __future__ import annotations

import asyncio
import gc

import pytest

from refit_protocol.messages import GenerationFinished, GenerationStarted, ResolvedSampling
from refit_trainer.inbox import Mailbox
from refit_trainer.prompts import Reading
from refit_trainer.replies import AsyncReplies, TaskMailbox
from refit_trainer.stream import Delta

RESOLVED = ResolvedSampling(max_tokens=[1], clamped=[False], stop_token_ids=[], logprobs_mode="processed_logprobs")
STARTED = GenerationStarted(resolved=RESOLVED, prompt_lengths=[1])
FINISHED = GenerationFinished(
    deltas=[],
    outputs=1,
    prompt_tokens=1,
    generated_tokens=0,
    resolved=RESOLVED,
    first_token_milliseconds=0.0,
    total_milliseconds=0.0,
)


class Abandoned:
    """Remembers what nobody reads any more, and what was cancelled; that has then ended."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.cancelled: list[int | None] = []
        self.mailbox: Mailbox | None = None
        self.one_more = asyncio.Event()

    async def cancel(self, request: int | None, *, timeout_seconds: float) -> list[int]:
        assert timeout_seconds > 0
        self.cancelled.append(request)
        assert self.mailbox is not None
        self.mailbox.put(FINISHED)
        return []

    def abandon(self, request: int) -> None:
        self.requests.append(request)
        self.one_more.set()


def timers() -> int:
    """Of the running loop, those that are due some time."""
    return sum(not timer.cancelled() for timer in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]


def test_what_arrives_is_taken_in_order_by_who_waits_and_who_does_not() -> None:
    """Also several arrivals for one wake-up."""

    async def scenario() -> None:
        mailbox = TaskMailbox(60.0)
        waiting = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        arrivals: list[list[Delta]] = [[], [], []]
        for arrival in arrivals:
            mailbox.put(arrival)
        taken = [await waiting, await mailbox.get(), await mailbox.get()]
        assert [id(each) for each in taken] == [id(each) for each in arrivals]

    asyncio.run(scenario())


def test_the_time_runs_out_for_all_waiting_together() -> None:
    """What has arrived by then is still taken."""

    async def scenario() -> None:
        mailbox = TaskMailbox(0.01)
        with pytest.raises(TimeoutError):
            await mailbox.get()
        mailbox.put(STARTED)
        assert await mailbox.get() is STARTED
        with pytest.raises(TimeoutError):
            await mailbox.get()

    asyncio.run(scenario())


def test_a_consumer_that_is_cancelled_while_it_waits_can_come_back() -> None:
    """Nothing is lost that arrived meanwhile."""

    async def scenario() -> None:
        mailbox = TaskMailbox(60.0)
        waiting = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        waiting.cancel()
        mailbox.put(STARTED)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await mailbox.get() is STARTED

    asyncio.run(scenario())


@pytest.mark.parametrize("dropped", [False, True])
def test_an_iterator_leaves_no_timer_behind(dropped: bool) -> None:
    """Neither one that was closed nor one that nobody holds any more; both are abandoned, once."""

    async def scenario() -> None:
        abandoned = Abandoned()

        async def start(mailbox: Mailbox) -> int:
            return 7

        replies: AsyncReplies[Delta] | None = AsyncReplies(abandoned, start, lambda delta: delta, Reading(60.0))
        assert replies is not None
        waiting = asyncio.ensure_future(anext(replies))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert timers() == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        del waiting
        if not dropped:
            replies.close()
        replies = None
        gc.collect()
        await abandoned.one_more.wait()
        assert (timers(), abandoned.requests) == (0, [7])

    asyncio.run(scenario())


@pytest.mark.parametrize("sending", [False, True])
def test_what_was_cancelled_before_it_was_sent_is_cancelled_once_it_is(sending: bool) -> None:
    """Whether its iteration has not begun yet, or its request is on its way: the iteration comes to an end."""

    async def scenario() -> None:
        generations = Abandoned()
        may_send = asyncio.Event()

        async def start(mailbox: Mailbox) -> int:
            generations.mailbox = mailbox
            await may_send.wait()
            return 7

        replies: AsyncReplies[Delta] = AsyncReplies(generations, start, lambda delta: delta, Reading(60.0))
        reading = asyncio.ensure_future(anext(replies)) if sending else None
        await asyncio.sleep(0)
        await replies.cancel()
        assert generations.cancelled == []
        may_send.set()
        with pytest.raises(StopAsyncIteration):
            await (reading or anext(replies))
        assert (generations.cancelled, replies.finished) == ([7], FINISHED)

    asyncio.run(scenario())
