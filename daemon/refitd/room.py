"""Whether the memory that an engine will take is there, asked before the minutes that a load takes are spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil

from refitd.config import Config, EngineConfig
from refitd.doctor.devices import Gpu, read_gpus, visible_uuids
from refitd.model_files import weight_bytes

GIB = 1 << 30
# vLLM's own default; with less than this free it would end only after it has started its processes.
DEFAULT_GPU_FRACTION = 0.9


def room_problem(config: Config, environment: Mapping[str, str]) -> str | None:
    """What is too full for this engine, in one line; None where nothing is known to be."""
    gpus = read_gpus()
    if gpus and visible_uuids(gpus, environment) and not is_cpu_build():
        return gpu_problem(config.engine, gpus, visible_uuids(gpus, environment))
    return host_problem(config, psutil.virtual_memory().available)


def host_problem(config: Config, available_bytes: int) -> str | None:
    """Each worker of a CPU engine takes its KV cache whole; the weights are shared out in a replica."""
    engine = config.engine
    cache_bytes = _workers(engine) * engine.cpu_kv_cache_gib * GIB
    needed_bytes = cache_bytes + engine.data_parallel_size * weight_bytes(Path(config.model).expanduser())
    if needed_bytes <= available_bytes:
        return None
    return (
        f"the engine needs {needed_bytes / GIB:.1f} GiB of memory ({cache_bytes / GIB:.1f} of it KV cache), "
        f"{available_bytes / GIB:.1f} GiB are available: lower engine.cpu_kv_cache_gib, or wait"
    )


def gpu_problem(engine: EngineConfig, gpus: Sequence[Gpu], visible: Sequence[str]) -> str | None:
    """Of the devices that the engine will use; what a part of a divided GPU has free is not known here."""
    fraction = engine.gpu_memory_utilization or DEFAULT_GPU_FRACTION
    by_uuid = {gpu.uuid: gpu for gpu in gpus if not gpu.mig_uuids}
    for gpu in (by_uuid[uuid] for uuid in visible[: _workers(engine)] if uuid in by_uuid):
        if gpu.free_bytes < fraction * gpu.total_bytes:
            return (
                f"{gpu.name} {gpu.uuid} has {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free, "
                f"engine.gpu_memory_utilization = {fraction:g} takes {fraction * gpu.total_bytes / GIB:.1f}: "
                "lower it, or wait (nvidia-smi names who uses the device)"
            )
    return None


def _workers(engine: EngineConfig) -> int:
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size


def is_cpu_build() -> bool:
    """Of torch, and so of the engine; false where there is none."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False
