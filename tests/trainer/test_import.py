"""What importing the package costs a trainer."""

from __future__ import annotations

import subprocess
import sys

import pytest

import refit_trainer
from refit_trainer import AsyncDaemon, Daemon

PROGRAM = """
import sys
import refit_trainer
assert refit_trainer.Daemon and refit_trainer.Sampling
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "vllm", "refitd", "uvloop"}))
assert callable(refit_trainer.share_parameters)
print("torch" in sys.modules)
"""


def test_import_needs_no_torch() -> None:
    """Torch comes with the first name that handles tensors, the daemon's packages never."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["", "True"]


@pytest.mark.parametrize("client", [Daemon, AsyncDaemon])
def test_what_a_prepared_refit_is_can_be_written_in_an_annotation(client: type) -> None:
    """A trainer that hands it from one function to another imports its name from the package."""
    assert hasattr(refit_trainer, client.prepare_refit.__annotations__["return"])  # type: ignore[attr-defined]


def test_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as in any module."""
    program = "import refit_trainer; refit_trainer.share_parameter"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "AttributeError" in ran.stderr
