"""The demo: what it rewards, how it judges itself, and that it runs, learns and leaves nothing behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from examples.weekdays import policy, task, verdict
from examples.weekdays.child_daemon import endpoint_in
from examples.weekdays.verdict import StepRecord, WrongWeights

from refit_protocol.states import EngineState
from refit_trainer import Daemon

ROOT = Path(__file__).parent.parent
DAY_TOKENS = [10, 11, 12, 13, 14, 15, 16]
MONDAY, SATURDAY = 0, 5
FEW_STEPS = 14
END_SECONDS = 60.0


def run_of(rewards: list[float], difference: float = 1e-7) -> list[StepRecord]:
    return [StepRecord(step, reward, difference, 5.0, 1000.0, step) for step, reward in enumerate(rewards, 1)]


# --- the task ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("day", "answer", "expected"),
    [
        (MONDAY, [11, 12, 13], 1.0),
        (SATURDAY, [16, 10, 11], 1.0),
        (MONDAY, [11, 12, 99], 2 / 3),
        (MONDAY, [99, 98, 97], 0.0),
        (MONDAY, [99, 10, 98], task.CREDIT_FOR_ANY_DAY / 3),
    ],
)
def test_right_days_are_rewarded_and_other_days_a_little(day: int, answer: list[int], expected: float) -> None:
    """All right is 1, no day at all is 0, and the week goes on after Sunday."""
    assert task.reward(day, answer, DAY_TOKENS) == pytest.approx(expected)


def test_days_after_a_mistake_count_as_any_day() -> None:
    """Otherwise a wrong first day, counted on from correctly, would be worth learning."""
    assert task.reward(MONDAY, [13, 14, 15], DAY_TOKENS) == pytest.approx(task.CREDIT_FOR_ANY_DAY)


def test_each_day_is_one_token() -> None:
    """Seven different tokens, which decode to the days again."""
    tokenizer = task.build_tokenizer()
    tokens = task.token_of_each_day(tokenizer)
    assert len(set(tokens)) == len(task.DAYS)
    assert tokenizer.decode(tokens).split() == list(task.DAYS)


# --- the policy gradient ----------------------------------------------------------------------------------------------


def test_advantages_compare_within_a_group_only() -> None:
    """A group that did well as a whole gains nothing by that; equal rewards give no signal."""
    advantages = policy.group_advantages(torch.tensor([[0.0, 1.0], [0.9, 0.9]]))
    assert advantages[0, 1] == -advantages[0, 0] > 0.5
    assert advantages[1].tolist() == [0.0, 0.0]


def test_a_step_makes_the_better_answer_likelier() -> None:
    """Of two answers to one prompt, the one with the higher reward gains probability, the other loses."""
    model = policy.random_qwen3(vocab_size=64, seed=0)
    prompts, answers = torch.tensor([[1], [1]]), torch.tensor([[2, 3], [4, 5]])
    before = policy.answer_logprobs(model, prompts, answers)
    advantages = policy.group_advantages(torch.tensor([[1.0, 0.0]]))
    policy.reinforce(policy.make_optimizer(model), before, advantages)
    better, worse = (policy.answer_logprobs(model, prompts, answers) - before).sum(dim=1).tolist()
    assert better > 0 > worse


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_a_rise_to_the_goal_is_a_success() -> None:
    """No failure is found in a run like those on a real engine."""
    assert verdict.failures(run_of([0.003, 0.005, 0.006, 0.2, 0.9, 0.95, 0.99]), goal=0.8) == []


def test_a_reward_that_stays_is_a_failure() -> None:
    """The noise of a random model is no rise, whatever the goal."""
    (failure,) = verdict.failures(run_of([0.003, 0.006, 0.004, 0.008, 0.003, 0.007]), goal=None)
    assert "not a clear rise" in failure


def test_a_rise_short_of_the_goal_fails_a_whole_run_only() -> None:
    """A short run has no goal to reach."""
    records = run_of([0.003, 0.005, 0.006, 0.2, 0.3, 0.4])
    assert verdict.failures(records, goal=None) == []
    assert "not to 0.8" in verdict.failures(records, goal=0.8)[0]


@pytest.mark.parametrize("difference", [0.28, 5e-3, float("nan")])
def test_stale_weights_are_a_failure_though_the_reward_rises(difference: float) -> None:
    """One step with a difference as weights one step old show it is enough; NaN is no agreement either."""
    records = run_of([0.003, 0.005, 0.006, 0.9, 0.95, 0.99])
    records[3] = StepRecord(4, 0.9, difference, 5.0, 1000.0, 4)
    (failure,) = verdict.failures(records, goal=0.8)
    assert failure.startswith("step 4: engine and trainer disagree")


@pytest.mark.parametrize("versions", [[4, 3], [4, None], [5, 5]])
def test_tokens_of_other_weights_end_the_run(versions: list[int | None]) -> None:
    """Older, newer, or of several versions."""
    with pytest.raises(WrongWeights, match="version 4 was committed"):
        verdict.check_versions(4, versions)


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_short_run_learns_with_the_engine_on_the_trainers_weights(tmp_path: Path) -> None:
    """It exits with 0, so the reward rose and all logprobs agreed; JSON and picture are written; no daemon stays."""
    options = ["--steps", str(FEW_STEPS), "--json", tmp_path / "run.json", "--picture", tmp_path / "run.png"]
    outcome = subprocess.run(
        [sys.executable, ROOT / "examples/rl_demo.py", *options], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    steps = json.loads((tmp_path / "run.json").read_text())["steps"]
    assert [set(step) for step in steps] == [set(StepRecord.__dataclass_fields__)] * FEW_STEPS
    assert [step["version"] for step in steps] == list(range(1, FEW_STEPS + 1))
    assert max(step["logprob_abs_diff"] for step in steps) <= verdict.LARGEST_LOGPROB_DIFFERENCE
    assert steps[-1]["reward"] > steps[0]["reward"] + verdict.SMALLEST_RISE
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "run.png") in outcome.stdout


START_AND_WAIT = """
import sys
from pathlib import Path
from examples.weekdays.child_daemon import start

model, directory = map(Path, sys.argv[1:])
print(start(model, directory, ["engine.cpu_kv_cache_gib=1"], directory / "refitd.log").pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_daemon_ends_with_a_demo_that_is_killed(model_path: Path, short_directory: Path) -> None:
    """SIGKILL leaves the demo no chance to clean up, and still its daemon goes, here in the middle of loading."""
    directory = short_directory / "killed"
    directory.mkdir(mode=0o700)
    demo = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, model_path, directory],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with demo:
        try:
            assert demo.stdout is not None
            daemon = os.pidfd_open(int(demo.stdout.readline()))
            with Daemon.connect(endpoint_in(directory), timeout_seconds=END_SECONDS) as connected:
                assert connected.status().state in (EngineState.LOADING, EngineState.READY)
        finally:
            demo.send_signal(signal.SIGKILL)
    assert has_ended(daemon), "the daemon outlived the demo"


def has_ended(pidfd: int) -> bool:
    """Waits for the process; one that does not end by itself is killed."""
    try:
        ended, _, _ = select.select([pidfd], [], [], END_SECONDS)
        if not ended:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return bool(ended)
    finally:
        os.close(pidfd)
