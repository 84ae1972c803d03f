"""One real engine per test session, and what every test may lean on.

With `pytest -n`, the process that only divides the tests reads this file before it starts the others: torch and
transformers, whose import takes seconds, are left to these.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from refit_protocol.messages import Status
from refit_trainer import Daemon, Sampling
from tests.daemon_process import SPARING, DaemonProcess, running_daemon
from tests.wire import RawClient, raw_client

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT = [5, 60, 7, 400, 9]
# A shell that runs the tests in the background ignores SIGINT for them, and so for all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before torch is imported, here and in all that is started from here.
os.environ.update(SPARING)
# How long an example takes, or is drawn for, says more of a busy machine than of what is tested.
settings.register_profile("refitd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("refitd")

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported here stays: to look for garbage in it takes seconds now, and most of a second of each test that
    collects its own."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest's -n: which tests stay together. Without it pytest-xdist need not be installed."""
    from tests.distribution import ByFile

    return ByFile(config, log)


@pytest.fixture(scope="session")
def short_directory() -> Iterator[Path]:
    """A private directory with a path short enough for sockets, which pytest's own may not have."""
    with tempfile.TemporaryDirectory(prefix="refitd-test-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def model_path(short_directory: Path) -> Path:
    """An untied two-layer Qwen3 with weights of seed 0 and a tokenizer."""
    from tests.tiny_tokenizer import EOS_TOKEN_IDS, build_tokenizer
    from tests.worker.models import build_model

    path = short_directory / "model"
    build_model("qwen3", path, seed=0, eos_token_id=EOS_TOKEN_IDS)
    build_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def started_daemon(model_path: Path, short_directory: Path) -> Iterator[tuple[DaemonProcess, list[Status]]]:
    """The session's one daemon, and what it said of itself while it loaded."""
    with running_daemon(
        model_path,
        short_directory / "run",
        "refit.keep_last=host",
        "http.enabled=true",
        "http.tool_call_parser=hermes",
        "server.lease_seconds=20",
        "defer_load=true",
        wait=False,
    ) as process:
        yield process, process.load_and_watch()


@pytest.fixture(scope="session")
def daemon_process(started_daemon: tuple[DaemonProcess, list[Status]]) -> DaemonProcess:
    """The session's one daemon."""
    return started_daemon[0]


@pytest.fixture(scope="session")
def fresh_sample(daemon_process: DaemonProcess) -> tuple[list[int], list[float]]:
    """Greedy ids and logprobs of the daemon as it was started, before any refit."""
    with daemon_process.connect() as connected:
        assert connected.status().version == 0, "another test refitted the daemon first"
        sample = connected.generate_one(PROMPT, GREEDY)
    return sample.token_ids.tolist(), sample.logprobs.tolist()


@pytest.fixture
def daemon(daemon_process: DaemonProcess, fresh_sample: tuple[list[int], list[float]]) -> Iterator[Daemon]:
    """A fresh session on the session's daemon."""
    with daemon_process.connect() as connected:
        yield connected


@pytest.fixture
def writer(daemon_process: DaemonProcess) -> Iterator[RawClient]:
    """A session of this process that speaks frames."""
    with raw_client(daemon_process.endpoint) as client:
        client.hello(pid=os.getpid())
        yield client


@pytest.fixture
def model() -> PreTrainedModel:
    """The trainer's model, weights A (seed 0), its parameters shared."""
    from refit_trainer import share_parameters
    from tests.worker.models import random_model

    return share_parameters(random_model("qwen3", seed=0))


def load_seed(model: PreTrainedModel, seed: int) -> None:
    """Gives the shared model the weights of another seed, in place."""
    from tests.worker.models import random_model

    copy_parameters(random_model("qwen3", seed=seed), model)


def copy_parameters(other: PreTrainedModel, model: PreTrainedModel) -> None:
    """Gives the shared model the weights of another one, in place."""
    import torch

    with torch.no_grad():
        for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(new)
