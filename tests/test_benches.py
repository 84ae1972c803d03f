"""The benchmarks: nobody runs them as often as the tests, from which they take a lot."""

from __future__ import annotations

from importlib import import_module

import pytest
from scripts.benches.__main__ import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_a_benchmark_is_made_of_is_there(name: str) -> None:
    """Each can at least be begun."""
    assert callable(import_module(f"scripts.benches.{name}").measure)
