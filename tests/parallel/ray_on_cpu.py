"""vLLM's Ray executor on CPUs, where vLLM refuses it only for want of a name for the device.

Imported by the engine and, since Ray finds the workers' class here, by each worker before it asks for that name.
"""

from __future__ import annotations

import ray
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor import ray_executor_v2

# Ray counts what it is told to have; nothing looks for a device behind it.
CpuPlatform.ray_device_key = "GPU"


class WorkerOnCpu(ray_executor_v2.RayWorkerProc):
    """The same, found by Ray in this module."""


class RayOnCpu(ray_executor_v2.RayExecutorV2):
    """Starts a cluster of this machine alone, which ends with the engine."""

    def _init_executor(self) -> None:
        ray.init(
            num_cpus=2, num_gpus=self.parallel_config.world_size, include_dashboard=False, object_store_memory=80 << 20
        )
        ray_executor_v2.RayWorkerProc = WorkerOnCpu
        super()._init_executor()
