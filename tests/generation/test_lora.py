"""LoRA adapters that the daemon was started with, chosen by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from refit_protocol.errors import ErrorCode
from refit_trainer import RefitdError, Sampling
from tests.conftest import GREEDY, PROMPT
from tests.daemon_process import running_daemon

RANK = 8


def write_adapter(path: Path) -> None:
    """One that changes the queries of both layers much."""
    path.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 64, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (path / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "base_model_name_or_path": ""}))
    torch.manual_seed(1)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, 128, dtype=torch.bfloat16)
        tensors[f"{name}.lora_B.weight"] = torch.randn(128, RANK, dtype=torch.bfloat16)
    save_file(tensors, path / "adapter_model.safetensors")


@pytest.mark.slow
def test_a_request_chooses_its_adapter_by_name(model_path: Path, short_directory: Path) -> None:
    """In one batch of requests each gets its own; an adapter that is not there is refused with those that are."""
    adapter = short_directory / "loud"
    write_adapter(adapter)
    with (
        running_daemon(
            model_path, short_directory / "lora-run", f'engine.loras={{loud = "{adapter}"}}', "engine.max_num_seqs=8"
        ) as process,
        process.connect() as daemon,
    ):
        plain, loud = daemon.generate([PROMPT], GREEDY), daemon.generate([PROMPT], GREEDY, lora="loud")
        (base,), (changed,) = list(plain), list(loud)
        assert base.token_ids.tolist() != changed.token_ids.tolist()
        assert daemon.generate_one(PROMPT, GREEDY).token_ids.tolist() == base.token_ids.tolist()
        assert daemon.generate_one(PROMPT, GREEDY, lora="loud").token_ids.tolist() == changed.token_ids.tolist()
        with pytest.raises(RefitdError, match="loaded are: loud") as refused:
            daemon.generate_one(PROMPT, Sampling(max_tokens=1), lora="quiet")
        assert refused.value.code is ErrorCode.INVALID_SAMPLING
