"""The loop of docs/trainer.md, as it stands there."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from examples import grpo
from refit_trainer import Daemon
from tests.daemon_process import DaemonProcess
from tests.waiting import until

ROOT = Path(__file__).parents[2]
STEPS = 12


def test_the_loop_learns_and_does_a_step_again_that_was_cut_off(
    daemon: Daemon,
    daemon_process: DaemonProcess,
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The reward rises; a deadline in the middle costs a step's time, and no step is learned from a part."""
    monkeypatch.setattr(grpo, "PAUSE_SECONDS", 0.0)
    deadlines = iter([300.0, 300.0, 0.001])
    generate = Daemon.generate

    def hurried(self: Daemon, *arguments: object, **options: object) -> object:
        return generate(self, *arguments, **{**options, "deadline_seconds": next(deadlines, 300.0)})

    monkeypatch.setattr(Daemon, "generate", hurried)
    rewards = grpo.train(str(model_path), STEPS, daemon_process.endpoint, learning_rate=1e-2)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == STEPS + 1
    assert said[2].startswith("again in 0 s: deadline_exceeded: output")
    assert len(rewards) == STEPS
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.1
    # The daemon lets go of a session's sources behind its answer to the goodbye.
    until(lambda: daemon.status().writer is None, "the role to be free")


def test_the_page_shows_the_loop() -> None:
    """Word for word, without the head of the file."""
    code = (ROOT / "examples" / "grpo.py").read_text().partition("PROMPTS = ")[2]
    assert code in (ROOT / "docs" / "trainer.md").read_text()
