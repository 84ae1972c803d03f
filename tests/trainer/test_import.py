"""What importing the package costs a trainer."""

from __future__ import annotations

import subprocess
import sys

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


def test_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as in any module."""
    program = "import refit_trainer; refit_trainer.share_parameter"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "AttributeError" in ran.stderr
