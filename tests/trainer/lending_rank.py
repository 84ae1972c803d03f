"""One rank of a trainer, as its own process: refits when it is told to by a line, and says how it ended."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from refit_protocol.messages import RefitReport
from refit_trainer import Daemon, RefitdError, share_parameters
from refit_trainer.sharing import shared_module
from refit_trainer.steps import walk_blocking


def refit(daemon: Daemon, model: torch.nn.Module) -> RefitReport:
    """As for a sharded module; that this one is whole makes no difference to what is said."""
    shared = shared_module(model)
    assert shared is not None
    report: RefitReport = walk_blocking(daemon._daemon._ranked().refit(shared, {}), daemon._thread)
    return report


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(endpoint: str, directory: str, rank: str, world_size: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=int(rank), world_size=int(world_size)
    )
    model = share_parameters(torch.nn.Linear(2, 2))
    with Daemon.connect(endpoint, client=f"rank {rank}") as daemon:
        say("connected")
        for line in sys.stdin:
            try:
                say(refit(daemon, model).version if line == "refit\n" else daemon.manifest().tensors)
            except (RefitdError, KeyboardInterrupt) as error:
                say(type(error).__name__)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
