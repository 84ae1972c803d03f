"""A trainer of a fleet that is killed between two phases of a refit of all or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from refit_trainer import Fleet, share_parameters
from refit_trainer.daemon_refit import DaemonRefit
from tests.worker.models import random_model

Moment = Literal["validated", "held"]
# The first command of the phase that is not reached.
_NEXT = {"validated": "hold", "held": "finish"}


def start_dying_trainer(endpoints: list[str], seed: int, moment: Moment) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.fleet.dying_trainer", str(seed), moment, *endpoints]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL)


async def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(seed: str, moment: Moment, *endpoints: str) -> None:
    setattr(DaemonRefit, _NEXT[moment], _die)
    with Fleet.connect(endpoints, on_failure="restore") as fleet:
        fleet.acquire_writer(takeover=True)
        fleet.refit(share_parameters(random_model("qwen3", seed=int(seed))))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
