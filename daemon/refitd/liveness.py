"""Whether the engine lives: it is asked again and again, and while it does not answer its processes are looked at.

An engine does one thing at a time, so one that compiles a kernel, or computes a very long step, answers late.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import psutil
import structlog

from refit_protocol.errors import ProtocolError
from refitd.config import EngineConfig
from refitd.engine import Engine

# The last part of the time for an answer, in which the processes are watched.
WATCHED_SHARE = 0.25
# Of one core, for one process: the timers of an idle one use a hundredth, what compiles beside many still gets more.
WORKING_SHARE = 0.05
# What is counted in clock ticks says nothing below two of them.
LEAST_WORK_SECONDS = 0.02
STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})

log = structlog.get_logger()


class Liveness:
    """Asks one engine. `is_trusted` says that there is nothing to ask, or that a call with a deadline of its own is
    out.
    """

    def __init__(self, config: EngineConfig, engine: Engine, is_trusted: Callable[[], bool]) -> None:
        self._interval_seconds = config.liveness_interval_seconds
        self._timeout_seconds = config.liveness_timeout_seconds
        self._busy_seconds = max(config.liveness_busy_seconds, config.liveness_timeout_seconds)
        self._engine = engine
        self._is_trusted = is_trusted
        self.on_sign: Callable[[], None] = lambda: None
        self.on_answer: Callable[[float], None] = lambda _seconds: None
        self.on_missed: Callable[[], None] = lambda: None
        self.on_death: Callable[[TimeoutError], None] = lambda _error: None

    async def watch(self) -> None:
        """Calls `on_sign` at least once in every timeout while the engine lives; ends with `on_death`."""
        while (why_dead := await self._look()) is None:
            self.on_sign()
            await asyncio.sleep(self._interval_seconds)
        self.on_death(TimeoutError(why_dead))

    async def _look(self) -> str | None:
        """What the engine is dead of, if it is."""
        if self._is_trusted():
            return None
        ping = asyncio.ensure_future(self._engine.ping())
        try:
            return await self._await_answer(ping)
        except ProtocolError:
            # It has been told what the engine died of, or that there is none any more.
            return None
        finally:
            ping.cancel()

    async def _await_answer(self, ping: asyncio.Future[None]) -> str | None:
        """As `_look`; raises what `ping` does."""
        asked = time.monotonic()
        while True:
            works = await self._wait(ping)
            waited = time.monotonic() - asked
            if ping.done():
                ping.result()
                self.on_answer(waited)
                return None
            self.on_missed()
            if self._is_trusted():
                return None
            if why_dead := self._judge(waited, works=works):
                return why_dead
            self.on_sign()

    def _judge(self, waited_seconds: float, *, works: bool) -> str | None:
        if not works:
            return f"no answer in {waited_seconds:.3g} s, and its processes do nothing"
        if waited_seconds >= self._busy_seconds:
            return f"no answer in {waited_seconds:.3g} s, although its processes work"
        log.warning("the engine does not answer, but its processes work", waited_seconds=round(waited_seconds))
        return None

    async def _wait(self, ping: asyncio.Future[None]) -> bool:
        """At the longest for the timeout; returns whether the engine's processes worked in the last part of it."""
        watched_seconds = self._timeout_seconds * WATCHED_SHARE
        await asyncio.wait({ping}, timeout=self._timeout_seconds - watched_seconds)
        if ping.done():
            return True
        # A look at all processes takes milliseconds: only now, when there is a reason.
        before, began = work_seconds(), time.monotonic()
        await asyncio.wait({ping}, timeout=watched_seconds)
        return is_work(before, work_seconds(), time.monotonic() - began)


def work_seconds() -> dict[int, float] | None:
    """Processor time of each process below this one, with that of its children that are gone.

    None where one is stopped: the others then wait for it, however busily.
    """
    worked: dict[int, float] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() in STOPPED:
                return None
            worked[process.pid] = sum(process.cpu_times()[:4])
    return worked


def is_work(before: dict[int, float] | None, after: dict[int, float] | None, seconds: float) -> bool:
    """Whether any one of them has worked: many that idle use as much together as one that compiles beside others."""
    if before is None or after is None:
        return False
    enough = max(LEAST_WORK_SECONDS, WORKING_SHARE * seconds)
    return any(worked - before.get(process, 0.0) >= enough for process, worked in after.items())
