"""Whether vLLM can load what is configured, as far as that is known without it: before a start, and by the doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from refitd.config import Config
from refitd.model_files import model_problem

# What vLLM's attention for CPUs is compiled for, in 0.32, the only release with a build for CPUs that refitd installs.
CPU_HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
# Of models that compute their attention's head size otherwise than from the two usual fields.
OTHER_HEAD_FIELDS = frozenset({"attention_head_dim", "hidden_size_per_head", "kv_lora_rank"})


def load_problem(config: Config, *, on_cpu: bool) -> str | None:
    """What is wrong, in one line; None where nothing is known to be. `on_cpu`: the engine is a build for CPUs."""
    if on_cpu and config.engine.enable_sleep_mode:
        return "engine.enable_sleep_mode is for GPUs, and this is vLLM for CPUs: leave it out (sleep works without it)"
    directory = model_directory(config)
    if directory is None:
        return None
    engine = config.engine
    own_tokenizer = engine.tokenizer and "tokenizer" not in engine.extra
    problem = model_problem(directory, weights=engine.load_format != "dummy", tokenizer=own_tokenizer)
    return problem or (_head_size_problem(directory) if on_cpu else None)


def model_directory(config: Config) -> Path | None:
    """None for a name, which is vLLM's to find."""
    path = Path(config.model).expanduser()
    looks_like_path = path.is_absolute() or config.model.startswith(("./", "../"))
    return path if looks_like_path or path.is_dir() else None


def _head_size_problem(directory: Path) -> str | None:
    size = _head_size(directory)
    if size is None or size in CPU_HEAD_SIZES:
        return None
    known = ", ".join(map(str, sorted(CPU_HEAD_SIZES)))
    return f"model directory {directory}: heads of {size} elements; vLLM's attention for CPUs takes {known}"


def _head_size(directory: Path) -> int | None:
    """Of one attention head; None where the configuration does not say it in the usual way."""
    try:
        content: Any = msgspec.json.decode((directory / "config.json").read_bytes())
        fields = content.get("text_config") or content
        if OTHER_HEAD_FIELDS & fields.keys():
            return None
        size = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    except (msgspec.DecodeError, RecursionError, AttributeError, KeyError, TypeError, ZeroDivisionError):
        return None
    return size if isinstance(size, int) else None
