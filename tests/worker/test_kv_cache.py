"""What is no finite number in a KV cache: found, and made zero."""

from __future__ import annotations

import pytest
import torch

from refitd.worker.kv_cache import clean, is_finite

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def cache_with(value: float, dtype: torch.dtype) -> torch.Tensor:
    """In one element of many, of a cache that is no plain row of them."""
    cache = torch.ones(8, 4, 16, dtype=dtype).transpose(0, 1)
    cache[2, 5, 7] = value
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_element_of_one_cache_is_enough(value: float, dtype: torch.dtype) -> None:
    """It is zero after the cleaning, and the rest is what it was."""
    caches = [cache_with(1, dtype), cache_with(value, dtype)]
    assert is_finite(caches[:1])
    assert not is_finite(caches)
    clean(caches)
    assert is_finite(caches)
    assert torch.equal(caches[1], cache_with(0, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_numbers_are_finite(dtype: torch.dtype) -> None:
    """However many there are: nobody prefills again for them."""
    assert is_finite([torch.full((64,), torch.finfo(dtype).max, dtype=dtype)])


@pytest.mark.parametrize("cache", [torch.empty(0), torch.ones(8).to(torch.float8_e5m2)], ids=["empty", "8 bits"])
def test_caches_without_extremes_are_looked_at_too(cache: torch.Tensor) -> None:
    assert is_finite([cache])


def test_numbers_that_stand_for_others_are_left_alone() -> None:
    """A quantised cache is bytes."""
    cache = torch.full((16,), 255, dtype=torch.uint8)
    assert is_finite([cache])
    clean([cache])
    assert cache.eq(255).all()
