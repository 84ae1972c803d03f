"""These tests need one NVIDIA GPU; elsewhere they are skipped and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _what_is_missing()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


def _what_is_missing() -> str | None:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    try:
        import cupy  # noqa: F401
    except ImportError:
        return "needs CuPy, of the extra cuda12 or cuda13"
    return None


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
