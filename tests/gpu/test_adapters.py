"""LoRA on CUDA kernels: an adapter changes its own requests only, and refits of the base stay exact beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from refit_trainer import Daemon, Sample, share_parameters
from tests.daemon_process import DaemonProcess
from tests.generation.conftest import CLOSE, Reference
from tests.generation.lora import adapter_weights, merged, write_adapter
from tests.gpu.conftest import GREEDY, PROMPT, SETTINGS, SHAPE, digest_of, load_values, running_daemons, trainer_model
from tests.worker.models import random_model

NAMES = (None, "one", "two")
SEEDS = {"one": 3, "two": 4}


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return random_model("qwen3", seed=0, **SHAPE)


@pytest.fixture(scope="module")
def with_lora(base: PreTrainedModel, checkpoints: dict[int, Path], short_directory: Path) -> Iterator[DaemonProcess]:
    """A daemon of this module's own, with one adapter from the start and room for a second."""
    one = write_adapter(short_directory / "gpu-adapters" / "one", adapter_weights(base, SEEDS["one"]))
    settings = (
        *SETTINGS,
        "lora.enabled=true",
        "lora.max_adapters=2",
        "lora.max_rank=8",
        f'lora.adapters={{one = "{one}"}}',
    )
    with running_daemons(short_directory, {"gpu-lora": (checkpoints[0], settings)}) as processes:
        yield processes["gpu-lora"]


@pytest.fixture
def daemon(with_lora: DaemonProcess, base: PreTrainedModel, tmp_path: Path) -> Iterator[Daemon]:
    """Both adapters are loaded, and the model's own weights served."""
    with with_lora.connect() as connected:
        connected.load_adapter("two", write_adapter(tmp_path / "two", adapter_weights(base, SEEDS["two"])))
        yield connected
        connected.reload()


def all_ids(daemon: Daemon) -> dict[str | None, list[int]]:
    return {name: daemon.generate_one(PROMPT, GREEDY, lora=name).token_ids.tolist() for name in NAMES}


def model_with(base: PreTrainedModel, name: str | None) -> PreTrainedModel:
    return merged(base, {} if name is None else adapter_weights(base, SEEDS[name]))


def is_made_by(model: PreTrainedModel, sample: Sample) -> bool:
    """Whether the logprobs are those that transformers computes, but for the rounding of bfloat16."""
    token_ids = torch.tensor(sample.token_ids.tolist())
    expected = torch.log_softmax(Reference(model).next_logits(sample), -1).gather(1, token_ids[:, None])[:, 0]
    return bool(sample.logprobs == pytest.approx(expected.numpy(), abs=CLOSE))


def test_each_request_of_a_batch_has_its_own_adapter(daemon: Daemon, base: PreTrainedModel) -> None:
    """Base model and both adapters, running together: each has the effect of its weights, and of no other's."""
    running = [(name, daemon.generate([PROMPT], GREEDY, lora=name)) for name in (*NAMES, *reversed(NAMES))]
    models = {name: model_with(base, name) for name in NAMES}
    for name, samples in running:
        sample = next(samples)
        assert [other for other in NAMES if is_made_by(models[other], sample)] == [name]


def test_refits_are_exact_with_adapters_and_leave_them(daemon: Daemon) -> None:
    """All by plan; A, B, A gives everybody the tokens of before, and the base its digest each time."""
    before = all_ids(daemon)
    assert len({tuple(ids) for ids in before.values()}) == len(NAMES)
    model = share_parameters(trainer_model(0))
    for seed in (1, 0):
        load_values(model, seed)
        report = daemon.refit(model, attest="full")
        assert (report.path, report.unplanned) == ("plan", [])
        assert daemon.digest("full").digest == digest_of(daemon, model)
        assert (all_ids(daemon) == before) is (seed == 0)
