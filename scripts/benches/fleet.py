"""A refit of three daemons against one, and against what the memory of this machine allows, in the same run."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch
from scripts.benches.figures import Figure, at_most
from scripts.benches.refit import ONE_GIGABYTE, interleaved, unwritten_model
from tests.daemon_process import DaemonProcess, start_daemon
from transformers import PreTrainedModel, Qwen3Config

from refit_trainer import Fleet, share_parameters

DAEMONS = 3
CORES = 2
# Three engines, their KV caches and the trainer have to fit a small machine.
HALF_A_GIGABYTE = {**ONE_GIGABYTE, "num_hidden_layers": 2}
SETTINGS = ("engine.load_format=dummy", "engine.tokenizer=false", "engine.max_num_seqs=4")


def measure() -> Iterator[Figure]:
    """Starts three engines at once; about two minutes on two cores."""
    config = Qwen3Config(**HALF_A_GIGABYTE, architectures=["Qwen3ForCausalLM"])
    model = share_parameters(unwritten_model(config))
    with tempfile.TemporaryDirectory(prefix="refitd-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        config.save_pretrained(directory / "model")
        daemons = [start_daemon(directory / "model", directory / str(n), *SETTINGS) for n in range(DAEMONS)]
        for daemon in daemons:
            stack.callback(daemon.stop)
        for daemon in daemons:
            daemon.wait_ready()
        _part_cores(daemons)
        copies = _copies(model)
        # One after the other: there is one writer at a time.
        clients = _of_clients(model, daemons, copies)
        seconds = _of_fleet(model, [daemon.endpoint for daemon in daemons], copies)
        yield from _figures(seconds, sum(parameter.nbytes for parameter in model.parameters()))
        added = seconds["three"] / seconds["memcpy_three"] / (clients["three"] / clients["memcpy_three"])
        # The same three refits at the same time, by three clients that know nothing of each other.
        yield at_most("fleet3_vs_three_clients", clients["three"] * 1e3, "ms", 1.3, ratio=added)


def _part_cores(daemons: list[DaemonProcess]) -> None:
    """As on machines of their own: the same few cores for each, whether it refits alone or beside the others.

    Not where there are too few; then they all have all.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < CORES * (DAEMONS + 1):
        return
    for index, daemon in enumerate(daemons):
        root = psutil.Process(daemon.process.pid)
        for process in [root, *root.children(recursive=True)]:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores[index * CORES : (index + 1) * CORES])
    os.sched_setaffinity(0, cores[DAEMONS * CORES :])


def _copies(model: PreTrainedModel) -> dict[str, Callable[[], object]]:
    """Plain ones, of which each run has its own: noise is not the same in two runs."""
    source = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    targets = [torch.empty_like(source) for _ in range(DAEMONS)]

    def three() -> None:
        with ThreadPoolExecutor(DAEMONS) as threads:
            [*threads.map(lambda target: _copy(source, target), targets)]

    return {"memcpy": lambda: _copy(source, targets[0]), "memcpy_three": three}


def _of_clients(
    model: PreTrainedModel, daemons: list[DaemonProcess], copies: dict[str, Callable[[], object]]
) -> dict[str, float]:
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(DAEMONS))
        clients = [stack.enter_context(daemon.connect()) for daemon in daemons]
        return interleaved({**copies, "three": lambda: [*threads.map(lambda each: each.refit(model), clients)]})


def _of_fleet(
    model: PreTrainedModel, endpoints: list[str], copies: dict[str, Callable[[], object]]
) -> dict[str, float]:
    with Fleet.connect(endpoints) as fleet:
        ways = {"single": lambda: _refit_of_one(fleet, model, endpoints), "three": lambda: fleet.refit(model)}
        return interleaved({**copies, **ways})


def _figures(seconds: dict[str, float], total_bytes: int) -> Iterator[Figure]:
    yield Figure("refit_bytes", total_bytes, "bytes")
    yield Figure("memcpy", seconds["memcpy"] * 1e3, "ms")
    yield Figure("single", seconds["single"] * 1e3, "ms", seconds["single"] / seconds["memcpy"])
    ratio = seconds["three"] / seconds["single"]
    yield at_most("fleet3_vs_single", seconds["three"] * 1e3, "ms", 1.3, ratio=ratio)
    # The two that say what the machine has to do with it: three copies share one memory and two cores here.
    yield Figure("fleet3_vs_single_per_byte", seconds["three"] / DAEMONS * 1e3, "ms", ratio / DAEMONS)
    copies = seconds["memcpy_three"] / seconds["memcpy"]
    # As if each daemon had a memory of its own: what three plain copies lose to each other is taken out.
    yield at_most("fleet3_vs_single_given_memory", ratio / copies, "", 1.3)
    yield Figure("memcpy3_vs_memcpy", seconds["memcpy_three"] * 1e3, "ms", copies)
    yield Figure("fleet3_vs_memcpy3", seconds["three"] * 1e3, "ms", seconds["three"] / seconds["memcpy_three"])


def _refit_of_one(fleet: Fleet, model: PreTrainedModel, endpoints: list[str]) -> None:
    for endpoint in endpoints[1:]:
        fleet.leave_out(endpoint)
    fleet.refit(model)
    for endpoint in endpoints[1:]:
        fleet.take_in(endpoint)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
