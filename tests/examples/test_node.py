"""The JavaScript client, written from the document alone, against a real daemon."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from refit_protocol.messages import (
    AcquireWriter,
    OpenSource,
    ReleaseWriter,
    SourceOpened,
    WriterAcquired,
    WriterReleased,
)
from refit_trainer import Daemon
from refit_trainer.sharing import shared_module
from tests.conftest import GREEDY, PROMPT, load_seed
from tests.daemon_process import DaemonProcess
from tests.server.raw_client import raw_client

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TEXT = ",".join(map(str, PROMPT))


@pytest.fixture(scope="module")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its packages; skips where Node or the packages cannot be had."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node.js is not installed")
    directory = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(ROOT / "examples" / "node", directory, ignore=shutil.ignore_patterns("node_modules"))
    try:
        installed = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund"],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip("npm install did not end: no network?")
    if installed.returncode:
        pytest.skip(f"npm install failed: {installed.stderr[-200:]}")
    return directory


def run(client: Path, *arguments: str) -> list[Any]:
    """What it printed, a JSON value a line."""
    done = subprocess.run(["node", *arguments], cwd=client, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_vectors_hold_for_another_language(node_client: Path) -> None:
    """Another message-pack library reads the published bytes as the published meaning."""
    done = subprocess.run(
        ["node", "--test"],
        cwd=node_client,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "REFITD_VECTORS": str(ROOT / "protocol" / "vectors")},
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_status(node_client: Path, daemon: Daemon, daemon_process: DaemonProcess) -> None:
    (status,) = run(node_client, "main.js", daemon_process.endpoint, "status")
    assert status["pid"] == daemon_process.process.pid
    assert status["version"] == daemon.status().version


def test_streamed_generation(node_client: Path, daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """Delta by delta the same tokens and logprobs that the Python client gets."""
    expected = daemon.generate_one(PROMPT, GREEDY)
    deltas = run(node_client, "main.js", daemon_process.endpoint, "generate", PROMPT_TEXT, str(GREEDY.max_tokens))
    assert [token for delta in deltas for token in delta["tokenIds"]] == expected.token_ids.tolist()
    assert [value for delta in deltas for value in delta["logprobs"]] == pytest.approx(expected.logprobs.tolist())
    assert deltas[-1]["finishReason"] == "length"


def test_refusals_are_typed(node_client: Path, daemon_process: DaemonProcess) -> None:
    refused = subprocess.run(
        ["node", "main.js", daemon_process.endpoint, "generate", "99999", "4"],
        cwd=node_client,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("invalid_prompt:")


def test_refit_is_triggered(
    node_client: Path, daemon: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel
) -> None:
    """The trainer opens the source, the other client says when; then it generates with the new weights."""
    load_seed(model, 11)
    shared = shared_module(model)
    assert shared is not None
    with raw_client(daemon_process.endpoint) as trainer:
        trainer.hello(pid=os.getpid())
        assert trainer.session is not None
        epoch = trainer.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
        opened = trainer.ask(
            OpenSource(epoch=epoch, kind="inplace", segments=shared.memory.segments, tensors=shared.tensors),
            SourceOpened,
        )
        before = daemon.status().version
        refit = ("main.js", daemon_process.endpoint, "refit", trainer.session, str(epoch), str(opened.source))
        (report,) = run(node_client, *refit)
        trainer.last += 100
        trainer.ask(ReleaseWriter(), WriterReleased)
    assert report["version"] == before + 1
    assert report["tensors"] == opened.tensors
    expected = daemon.generate_one(PROMPT, GREEDY)
    assert expected.version == before + 1
    deltas = run(node_client, "main.js", daemon_process.endpoint, "generate", PROMPT_TEXT, str(GREEDY.max_tokens))
    assert [token for delta in deltas for token in delta["tokenIds"]] == expected.token_ids.tolist()
    assert {version for delta in deltas for version, _ in delta["versions"]} == {before + 1}
