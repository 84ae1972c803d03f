"""What cannot be loaded is known before vLLM is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refitd.config import Config, EngineConfig
from refitd.loadable import load_problem


def problem(directory: Path, fields: dict[str, object], *, on_cpu: bool = True) -> str | None:
    """Of a model whose `config.json` has these fields, with weights and without a tokenizer."""
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return load_problem(Config(model=str(directory), engine=EngineConfig(tokenizer=False)), on_cpu=on_cpu)


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 16},
        {"hidden_size": 192, "num_attention_heads": 4},
        {"text_config": {"head_dim": 24}, "head_dim": 64},
    ],
)
def test_heads_that_attention_on_a_cpu_does_not_take(tmp_path: Path, fields: dict[str, object]) -> None:
    """Said or computed, of the text model where there are several; a GPU's attention takes others."""
    found = problem(tmp_path, fields)
    assert found is not None
    assert "32, 64, 80" in found
    assert problem(tmp_path, fields, on_cpu=False) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 128},
        {"head_dim": None, "hidden_size": 256, "num_attention_heads": 4},
        {"head_dim": 16, "kv_lora_rank": 512},
        {"hidden_size": 192, "num_attention_heads": 0},
        {"n_embd": 48},
        [],
    ],
)
def test_what_is_not_known_to_be_wrong_is_left_to_vllm(tmp_path: Path, fields: dict[str, object]) -> None:
    """Usual heads, and those of models that say their size in another way or not at all."""
    assert problem(tmp_path, fields) is None


def test_sleep_mode_is_for_gpus() -> None:
    """Whatever the model."""
    config = Config(model="somebody/something", engine=EngineConfig(enable_sleep_mode=True))
    found = load_problem(config, on_cpu=True)
    assert found is not None
    assert found.startswith("engine.enable_sleep_mode")
    assert load_problem(config, on_cpu=False) is None
