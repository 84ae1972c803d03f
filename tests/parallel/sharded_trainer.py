"""One rank of a trainer under FSDP2, as its own process: it does what the test tells it by lines on its input.

Each phase writes the whole weights to a file, which a test compares with what the engine serves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from refit_trainer import Daemon, share_parameters
from tests.parallel.engines import ODD_VOCABULARY, odd_model


@dataclass(frozen=True)
class Trainer:
    """Twins that see the same data: only the first shares its memory and refits the daemon."""

    daemon: Daemon
    directory: Path
    model: PreTrainedModel
    twin: PreTrainedModel
    optimisers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]

    def refit(self) -> dict[str, object]:
        report = self.daemon.refit(self.model)
        return {"version": report.version, "digest": report.digest, "path": report.path}

    def train(self) -> dict[str, object]:
        """One optimiser step, and whether the shared model went the same way as its twin."""
        torch.manual_seed(dist.get_rank())
        tokens = torch.randint(0, ODD_VOCABULARY, (2, 16))
        for model, optimiser in zip((self.model, self.twin), self.optimisers, strict=True):
            model(tokens, labels=tokens).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        pairs = zip(self.model.parameters(), self.twin.parameters(), strict=True)
        return {"equal": all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs)}

    def load(self) -> dict[str, object]:
        """The weights that the engine was started on, in place."""
        for parameter, whole in zip(self.model.parameters(), odd_model(0).parameters(), strict=True):
            rows = torch.chunk(whole.detach(), dist.get_world_size())
            if dist.get_rank() < len(rows):
                parameter.to_local().detach().copy_(rows[dist.get_rank()])
        return {}

    def save(self) -> dict[str, object]:
        whole = {name: parameter.full_tensor().detach() for name, parameter in self.model.named_parameters()}
        if dist.get_rank() == 0:
            torch.save(whole, self.directory / "weights.pt")
        return {}

    def leave(self) -> dict[str, object]:
        """Dies without a word."""
        os.kill(os.getpid(), 9)
        return {}


def sharded_model() -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = odd_model(0).train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(endpoint: str, directory: str, rank: str, world_size: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=int(rank), world_size=int(world_size)
    )
    model, twin = sharded_model(), sharded_model()
    share_parameters(model)
    optimisers = (torch.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(twin.parameters(), lr=1e-2))
    with Daemon.connect(endpoint, client=f"rank {rank}") as daemon:
        trainer = Trainer(daemon, Path(directory), model, twin, optimisers)
        phases: dict[str, Callable[[], dict[str, object]]] = {
            phase.__name__: phase for phase in (trainer.refit, trainer.train, trainer.load, trainer.save, trainer.leave)
        }
        for line in sys.stdin:
            try:
                answer = phases[line.strip()]()
            # The test is told whatever happened.
            except Exception as error:  # noqa: BLE001
                answer = {"error": f"{type(error).__name__}: {error}", "code": getattr(error, "code", None)}
            sys.stdout.write(f"{msgspec.json.encode(answer).decode()}\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
