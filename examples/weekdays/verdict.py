"""When a run counts as a success, and what it is judged by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

# Steps at either end of a run over which the reward is averaged.
WINDOW_STEPS = 3
# A random model earns about 0.005, give or take 0.003 at each step.
SMALLEST_RISE = 0.04
GOAL_REWARD = 0.8
# The same arithmetic in float32 differs by about 1e-7; weights that are one step old, by 0.1 while the model learns.
LARGEST_LOGPROB_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class StepRecord:
    """What one step measured. `reward` and `logprob_abs_diff` are means over its answers and their tokens.

    `version` names the weights that the step committed in `refit_ms` milliseconds and that made all of its tokens.
    """

    step: int
    reward: float
    logprob_abs_diff: float
    refit_ms: float
    tokens_per_second: float
    version: int


class WrongWeights(Exception):  # noqa: N818 - what happened
    """Tokens came that the weights just committed have not made."""


def check_versions(committed: int, versions: Iterable[int | None]) -> None:
    """Raises `WrongWeights` unless every sample was made by version `committed` alone; None stands for several."""
    others = {version for version in versions if version != committed}
    if others:
        raise WrongWeights(f"version {committed} was committed, but samples came from {sorted(map(str, others))}")


def failures(records: Sequence[StepRecord], goal: float | None) -> list[str]:
    """Why the run is no success, a sentence each; none if it is one. `goal` None asks for no more than a clear rise."""
    found = []
    if first_apart := next((record for record in records if not agrees(record)), None):
        found.append(
            f"step {first_apart.step}: engine and trainer disagree by {first_apart.logprob_abs_diff:.1e} a logprob,"
            f" more than {LARGEST_LOGPROB_DIFFERENCE:.0e}: the engine does not run the trainer's weights"
        )
    first, last = mean_reward(records[:WINDOW_STEPS]), mean_reward(records[-WINDOW_STEPS:])
    if not last - first >= SMALLEST_RISE:
        found.append(f"the reward went from {first:.3f} to {last:.3f}: not a clear rise")
    elif goal is not None and last < goal:
        found.append(f"the reward rose to {last:.3f} only, not to {goal}")
    return found


def agrees(record: StepRecord) -> bool:
    """Whether engine and trainer computed the same; NaN is no agreement."""
    return record.logprob_abs_diff <= LARGEST_LOGPROB_DIFFERENCE


def mean_reward(records: Sequence[StepRecord]) -> float:
    return fmean(record.reward for record in records)
