"""Looks for what is no finite number in the KV cache, and makes it zero.

Masked or not, one NaN in a block makes NaN of every attention that reads the block.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_finite(caches: Iterable[torch.Tensor]) -> bool:
    return all(bool(_witness(cache).isfinite().all()) for cache in _floating(caches))


def clean(caches: Iterable[torch.Tensor]) -> None:
    """Leaves what is finite as it is."""
    for cache in _floating(caches):
        torch.nan_to_num_(cache, nan=0.0, posinf=0.0, neginf=0.0)


def _witness(cache: torch.Tensor) -> torch.Tensor:
    """What NaN and infinity survive in, for a pass over the cache and no memory of its own."""
    if cache.device.type == "cpu" and cache.itemsize > 1 and cache.numel():
        # A processor sums half precision in float32 one by one: seven times as long. It knows no extremes of 8 bits.
        return torch.stack(torch.aminmax(cache))
    return cache.sum(dtype=torch.float32)


def _floating(caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [cache for cache in caches if cache.is_floating_point()]
