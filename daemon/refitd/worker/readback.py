"""Single numbers brought from the device, on their way while something else is waited for."""

from __future__ import annotations

from collections.abc import Callable

import torch


def read_back(value: torch.Tensor) -> Callable[[], int]:
    """Enqueues the read of a tensor of one integer or truth value; what is returned waits for it and gives it."""
    if not value.is_cuda:
        return lambda: int(value)
    host = torch.empty((), dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def number() -> int:
        arrived.synchronize()
        return int(host)

    return number
