"""In-place refits of an engine of two tensor-parallel workers, against one of a single worker, by turns in one run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.benches.figures import Figure, at_most
from scripts.benches.refit import interleaved, unwritten_model
from tests.daemon_process import running_daemon
from transformers import Qwen3Config

from refit_trainer import share_parameters

HALF_A_GIGABYTE = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
OPTIONS = ("engine.load_format=dummy", "engine.tokenizer=false")


def measure() -> Iterator[Figure]:
    """Two engines at a time, of 3 GiB together; about two minutes on two cores."""
    config = Qwen3Config(**HALF_A_GIGABYTE, architectures=["Qwen3ForCausalLM"])
    model = share_parameters(unwritten_model(config))
    with tempfile.TemporaryDirectory(prefix="refitd-bench-") as name:
        directory = Path(name)
        config.save_pretrained(directory / "model")
        with (
            running_daemon(directory / "model", directory / "one", *OPTIONS) as one,
            running_daemon(directory / "model", directory / "two", *OPTIONS, "engine.tensor_parallel_size=2") as two,
            one.connect() as single,
            two.connect() as parallel,
        ):
            seconds = interleaved({"single": lambda: single.refit(model), "tp2": lambda: parallel.refit(model)})
            single_bytes, parallel_bytes = single.refit(model).size_bytes, parallel.refit(model).size_bytes
    ratio = (seconds["tp2"] / parallel_bytes) / (seconds["single"] / single_bytes)
    yield Figure("single_inplace", seconds["single"] * 1e3, "ms")
    yield Figure("single_bytes", single_bytes, "bytes")
    yield Figure("tp2_bytes", parallel_bytes, "bytes")
    yield at_most("tp2_inplace_vs_single", seconds["tp2"] * 1e3, "ms", 1.5, ratio=ratio)
