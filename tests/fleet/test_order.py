"""How a batch is cut into what single daemons are asked for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refit_protocol.messages import Sampling
from refit_trainer.fleet.order import Order, Part

PROMPTS = [[1], [2, 2], [3, 3, 3]]


def order(**sampling: object) -> Order:
    options = {"deadline_seconds": 60.0, "min_version": 2, "max_version_lag": 1}
    return Order(PROMPTS, Sampling(**sampling), options, None, whole=True, mixed=False)  # type: ignore[arg-type]


@given(st.integers(1, 4), st.data())
def test_what_is_left_is_all_that_was_not_done(outputs: int, data: st.DataObject) -> None:
    """Each once, at one more move, whatever had been done; what is left of that again too."""
    part = Part((5, 0, 9), 0, outputs)
    done = set(data.draw(st.lists(st.sampled_from(part.keys), unique=True)))
    left = [*part.without(done)]
    assert sorted(key for rest in left for key in rest.keys) == sorted(set(part.keys) - done)
    assert all(rest.moves == 1 for rest in left)
    again = [key for rest in left for part in rest.without(done) for key in part.keys]
    assert sorted(again) == sorted(set(part.keys) - done)


def test_whole_prompts_stay_together() -> None:
    """One request for the prompts of which nothing had come, one for each output that is missing from a group."""
    part = Part((0, 1, 2), 0, 2)
    assert [*part.without({(1, 0)})] == [Part((0, 2), 0, 2, 1), Part((1,), 1, 1, 1)]


def test_a_moved_output_has_the_seed_it_would_have_had() -> None:
    """Output i uses seed + i, alone as in its group."""
    command, blobs = order(n=3, seed=100).command(Part((2,), 2, 1), 7, 30.0)
    assert (command.sampling.n, command.sampling.seed) == (1, 102)
    assert command.prompt_lengths == [3]
    assert np.frombuffer(blobs[0], np.int32).tolist() == [3, 3, 3]


def test_a_pinned_batch_waits_for_its_version_and_a_mixed_one_for_the_callers() -> None:
    pinned, _ = order().command(order().everything, 7, 30.0)
    assert (pinned.min_version, pinned.max_version_lag, pinned.deadline_seconds) == (7, None, 30.0)
    mixed, _ = order().command(order().everything, None, 30.0)
    assert (mixed.min_version, mixed.max_version_lag) == (2, 1)
