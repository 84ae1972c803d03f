"""Looks for what is no finite number in the KV cache, and makes it zero.

Masked or not, one NaN in a block makes NaN of every attention that reads the block.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_finite(caches: Iterable[torch.Tensor]) -> bool:
    # NaN and infinity both survive a sum, which takes no memory of its own.
    return all(bool(cache.sum(dtype=torch.float32).isfinite()) for cache in _floating(caches))


def clean(caches: Iterable[torch.Tensor]) -> None:
    """Leaves what is finite as it is."""
    for cache in _floating(caches):
        torch.nan_to_num_(cache, nan=0.0, posinf=0.0, neginf=0.0)


def _floating(caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [cache for cache in caches if cache.is_floating_point()]
