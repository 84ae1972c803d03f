"""What vLLM is started with: its arguments and environment, made of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from refitd.config import Config, ConfigError, LoraConfig

if TYPE_CHECKING:
    from refitd.compat import StampedLLM

WORKER_EXTENSION = "refitd.worker.extension.RefitWorkerExtension"


def engine_environment(config: Config) -> dict[str, str]:
    """Variables that vLLM reads and has no argument for; set once, by `app`, before vLLM is imported."""
    engine = config.engine
    single = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size == 1
    return {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if single else "1",
        "VLLM_CPU_KVCACHE_SPACE": str(config.engine.cpu_kv_cache_gib),
        "VLLM_LOGGING_LEVEL": config.log.vllm_level,
        "VLLM_NO_USAGE_STATS": "1",
        # Python's tracker removes what an engine that was ended at once has left, and calls that a leak.
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
        # Weights are copied once and not read again soon: past 256 KiB (the slices of several workers
        # are small) glibc's memcpy should not read the destination's cache lines before it overwrites them. Measured:
        # nearly half the time of a refit on CPU. Read at exec.
        "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x40000",
    }


def start(config: Config) -> StampedLLM:
    """Blocks for seconds to minutes. Raises `ConfigError` for what vLLM refuses, and whatever else it raises."""
    from refitd import compat

    arguments = engine_arguments(config)
    unknown = sorted(set(arguments) - compat.engine_argument_names())
    if unknown:
        raise ConfigError(f"engine.extra: vLLM {compat.VLLM_VERSION} has no engine argument {', '.join(unknown)}")
    try:
        llm = compat.StampedLLM.from_engine_args(compat.AsyncEngineArgs(**arguments))
    except ValidationError as error:
        raise ConfigError(f"vLLM refuses this configuration: {refusal_of(error)}") from error
    assert isinstance(llm, compat.StampedLLM)
    return llm


def refusal_of(error: ValidationError) -> str:
    """The first of what is wrong, in one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    reason = " ".join(first["msg"].removeprefix("Value error, ").split())
    return f"{where}: {reason}" if where else reason


def engine_arguments(config: Config) -> dict[str, Any]:
    engine = config.engine
    optional = {
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "served_model_name": engine.served_model_name,
    }
    return {
        "model": config.model,
        "dtype": engine.dtype,
        "load_format": engine.load_format,
        "skip_tokenizer_init": not engine.tokenizer,
        "seed": engine.seed,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "data_parallel_size": engine.data_parallel_size,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enable_sleep_mode": engine.enable_sleep_mode,
        "logprobs_mode": engine.logprobs_mode,
        "max_logprobs": engine.max_logprobs,
        "scheduling_policy": engine.scheduling_policy,
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_log_requests": False,
        **_lora_arguments(config.lora),
        **{name: value for name, value in optional.items() if value is not None},
        **engine.extra,
    }


def _lora_arguments(lora: LoraConfig) -> dict[str, Any]:
    if not lora.enabled:
        return {}
    return {"enable_lora": True, "max_loras": lora.max_adapters, "max_lora_rank": lora.max_rank}
