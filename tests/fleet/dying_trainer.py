"""A trainer of a fleet that is killed between two phases of a refit of all or none."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from refit_protocol.messages import RefitReport
from refit_trainer import Fleet, share_parameters
from refit_trainer.daemon_refit import DaemonRefit
from tests.worker.models import random_model

Moment = Literal["validated", "held", "published by one"]


def start_dying_trainer(endpoints: list[str], seed: int, moment: Moment) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.fleet.dying_trainer", str(seed), moment, *endpoints]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL)


def main(seed: str, moment: Moment, *endpoints: str) -> None:
    _arrange_death(moment)
    with Fleet.connect(endpoints, on_failure="restore") as fleet:
        fleet.acquire_writer(takeover=True)
        fleet.refit(share_parameters(random_model("qwen3", seed=int(seed))))


def _arrange_death(moment: Moment) -> None:
    """By the command that follows the moment."""
    if moment == "validated":
        DaemonRefit.hold = _die  # type: ignore[assignment]
    elif moment == "held":
        DaemonRefit.finish = _die  # type: ignore[assignment]
    else:
        DaemonRefit.finish = _one_and_die(DaemonRefit.finish)  # type: ignore[assignment]


async def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _one_and_die(finish: Callable[[DaemonRefit], Awaitable[RefitReport]]) -> Callable[[DaemonRefit], Awaitable[None]]:
    """The first that asks publishes, the others never come to it."""
    first = asyncio.Lock()

    async def finish_once(refit: DaemonRefit) -> None:
        async with first:
            await finish(refit)
            await _die()

    return finish_once


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
