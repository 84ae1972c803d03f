"""A bounded run of the coverage-guided fuzzer; `scripts/fuzz` runs it for as long as one likes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).resolve().parents[2] / "scripts" / "fuzz_wire.py"


@pytest.mark.slow
def test_fuzzer_finds_nothing(tmp_path: Path) -> None:
    """It writes the offending input and ends with an error if it does."""
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris has no wheel for this Python")
    command = [sys.executable, str(FUZZER), "-runs=20000", "-max_total_time=20", "-verbosity=0", "-rss_limit_mb=1024"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert found.returncode == 0, (found.stdout + found.stderr)[-3000:]
