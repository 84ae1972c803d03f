"""The reason of a failed engine process reaches the daemon: from a process that logs as vLLM's do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from refitd import engine_failure, log

# What vLLM's processes do, each for itself: set up logging from the named file, and log what ended their loop.
FAILING = """
import json, logging.config, os, sys
logging.config.dictConfig(json.load(open(os.environ["VLLM_LOGGING_CONFIG_PATH"])))
try:
    raise RuntimeError(sys.argv[2])
except RuntimeError:
    logging.getLogger(sys.argv[1]).exception("EngineCore failed to start.")
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    environment = dict(os.environ)
    engine_failure.prepare(environment, tmp_path)
    log.export(environment)
    return environment


def fail(environment: dict[str, str], logger: str, reason: str) -> str:
    command = [sys.executable, "-c", FAILING, logger, reason]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr


def test_the_first_process_that_fails_says_why(tmp_path: Path, environment: dict[str, str]) -> None:
    """A worker's reason is not hidden by that of the process above it; both tracebacks are in the log as before."""
    assert engine_failure.read(tmp_path) is None
    worker = fail(environment, "vllm.v1.executor.multiproc_executor", "head_dim=16\n is not supported")
    core = fail(environment, "vllm.v1.engine.core", "a worker failed, see above")
    assert engine_failure.read(tmp_path) == "RuntimeError: head_dim=16 is not supported"
    assert worker.count("Traceback") == core.count("Traceback") == 1


def test_what_others_log_is_no_reason(tmp_path: Path, environment: dict[str, str]) -> None:
    """vLLM logs exceptions that it goes on after."""
    fail(environment, "vllm.utils", "no such library, going on without")
    assert engine_failure.read(tmp_path) is None


def test_the_next_start_forgets_it(tmp_path: Path, environment: dict[str, str]) -> None:
    """A daemon that was killed leaves the record behind."""
    fail(environment, "vllm.v1.engine.core", "out of memory")
    engine_failure.prepare({}, tmp_path)
    assert engine_failure.read(tmp_path) is None


def test_a_long_reason_is_cut() -> None:
    """Native errors carry their stacks; the log has them whole."""
    assert len(engine_failure.one_line(RuntimeError("frame #0\n" * 1000))) == engine_failure.MAX_CHARACTERS
