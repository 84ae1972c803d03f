"""What an adapter's weights may be, found out before vLLM gets them. No engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from refitd.worker.adapters import check_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    """One element is enough, whichever dtype it is in."""
    spoilt = torch.ones(4, 4)
    weights = {"good": torch.ones(2, 3).to(dtype), "spoilt": spoilt.to(dtype)}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    check_finite(tmp_path)
    spoilt[2, 1] = value
    save_file({**weights, "spoilt": spoilt.to(dtype)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="spoilt is not finite"):
        check_finite(tmp_path)
