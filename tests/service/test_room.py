"""Memory that an engine will take is looked for before it is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from refitd.config import Config, EngineConfig
from refitd.doctor.devices import Gpu
from refitd.room import GIB, gpu_problem, host_problem

FULL = Gpu("GPU-full", "H200", total_bytes=100 * GIB, free_bytes=40 * GIB)
EMPTY = Gpu("GPU-empty", "H200", total_bytes=100 * GIB, free_bytes=99 * GIB)
PARTS = Gpu("GPU-parts", "H200", total_bytes=100 * GIB, free_bytes=1 * GIB, mig_uuids=("MIG-1",))


@pytest.mark.parametrize(
    ("engine", "visible", "named"),
    [
        (EngineConfig(), ["GPU-empty"], None),
        (EngineConfig(), ["GPU-full"], "GPU-full has 40.0 of 100.0 GiB free"),
        (EngineConfig(gpu_memory_utilization=0.4), ["GPU-full"], None),
        (EngineConfig(gpu_memory_utilization=0.45), ["GPU-full"], "0.45 takes 45.0"),
        (EngineConfig(), ["GPU-empty", "GPU-full"], None),
        (EngineConfig(tensor_parallel_size=2), ["GPU-empty", "GPU-full"], "GPU-full"),
        (EngineConfig(), ["MIG-1"], None),
    ],
)
def test_only_the_devices_of_the_engine_are_judged(engine: EngineConfig, visible: list[str], named: str | None) -> None:
    """By what is free there and what the engine will take, as vLLM itself would do minutes later."""
    problem = gpu_problem(engine, [FULL, EMPTY, PARTS], visible)
    assert (problem is None) if named is None else (problem is not None and named in problem)


def test_a_cpu_engine_needs_its_cache_and_its_weights(tmp_path: Path) -> None:
    """Each worker has a cache of its own."""
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    two = Config(model=str(tmp_path), engine=EngineConfig(cpu_kv_cache_gib=1, tensor_parallel_size=2))
    assert host_problem(two, 2 * GIB + (1 << 20)) is None
    problem = host_problem(two, 2 * GIB)
    assert problem is not None
    assert "lower engine.cpu_kv_cache_gib" in problem
