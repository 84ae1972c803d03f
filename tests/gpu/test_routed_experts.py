"""Which experts each token went through: from a real mixture, over the wire, into the reference's batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from refit_trainer import Daemon, Sample, Sampling
from refit_trainer.generation_worker import GenerationWorker
from tests.conftest import PROMPT
from tests.daemon_process import DaemonProcess
from tests.gpu.conftest import SETTINGS, SHAPE, running_daemons
from tests.worker.models import build_model, random_model

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
LAYERS, CHOSEN = 2, 2


@pytest.fixture(scope="module")
def experts(short_directory: Path) -> Iterator[DaemonProcess]:
    """A daemon of this module's own, with four experts a layer, of which two are chosen for each token."""
    model = build_model("qwen3_moe", short_directory / "gpu-moe", seed=0, **SHAPE)
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("vllm.config.aux_output") is not None:
            # From here on vLLM returns experts from its second model runner only, which needs Triton: not on a CPU.
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        settings = (*SETTINGS, "engine.extra.enable_return_routed_experts=true")
        with running_daemons(short_directory, {"experts": (model, settings)}) as processes:
            yield processes["experts"]


@pytest.fixture
def daemon(experts: DaemonProcess) -> Iterator[Daemon]:
    with experts.connect() as connected:
        yield connected


@torch.no_grad()
def chosen_by_transformers(model: PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    """(tokens, layers, experts), sorted."""
    logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    return np.stack([layer.float().topk(CHOSEN, -1).indices.sort(-1).values.numpy() for layer in logits], axis=1)


def assert_chosen(sample: Sample, prompt: list[int]) -> None:
    assert sample.routed_experts is not None
    fed = [*prompt, *sample.token_ids.tolist()][: len(sample.routed_experts)]
    assert len(fed) >= len(prompt) + len(sample.token_ids) - 1
    expected = chosen_by_transformers(random_model("qwen3_moe", seed=0, **SHAPE), fed)
    same = (np.sort(sample.routed_experts, -1) == expected).all(-1)
    # Two experts of nearly the same weight may change places between two libraries.
    assert same.mean() > 0.9


def test_experts_are_those_that_transformers_chooses(daemon: Daemon) -> None:
    """One row for each token that was read, the prompt's first; only for who asks for them."""
    asked, plain = (daemon.generate_one(PROMPT, GREEDY, routed_experts=wanted) for wanted in (True, False))
    assert asked.routed_experts.shape[1:] == (LAYERS, CHOSEN)
    assert_chosen(asked, PROMPT)
    assert plain.routed_experts is None
    assert plain.token_ids.tolist() == asked.token_ids.tolist()


def test_every_sample_of_a_batch_has_its_own(daemon: Daemon) -> None:
    """Prompts of several lengths, twice, so that the second time the cache is warm; also beside requests without."""
    prompts = [[7, 8, 9], list(range(10, 210)), [300, 4]]
    other = daemon.stream([PROMPT], Sampling(max_tokens=100, ignore_eos=True))
    for _ in range(2):
        for sample in daemon.generate(prompts, GREEDY, routed_experts=True):
            assert_chosen(sample, prompts[sample.prompt])
    other.close()


def test_the_reference_worker_pads_them(daemon: Daemon, experts: DaemonProcess) -> None:
    """(1, width, layers, experts), -1 behind the last token."""
    worker = GenerationWorker(
        {
            "endpoint": experts.endpoint,
            "max_new_tokens": 6,
            "_pad_token_id": 0,
            "vllm_cfg": {"ignore_eos": True},
            "vllm_kwargs": {"enable_return_routed_experts": True},
        }
    )

    async def batches() -> list[dict[str, torch.Tensor]]:
        data = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0]]), "input_lengths": torch.tensor([4, 2])}
        found = [batch async for _, batch in worker.generate_async(data, greedy=True)]
        await worker.shutdown()
        return found

    for batch in asyncio.run(batches()):
        routed, used = batch["routed_experts"], int(batch["unpadded_sequence_lengths"])
        assert routed.shape == (1, batch["output_ids"].shape[1], LAYERS, CHOSEN)
        assert (routed[0, : used - 1] >= 0).all()
        assert (routed[0, used:] == -1).all()
