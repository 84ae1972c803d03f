"""Sleep and wake: every operation in every state, on CPU, where vLLM only tracks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.states import EngineState
from refit_trainer import Daemon, RefitdError, Sampling
from tests.conftest import GREEDY, PROMPT

Operation = Callable[[Daemon], object]

WAYS: dict[str, list[Operation]] = {
    "level 1": [lambda d: d.sleep(1)],
    "level 1, weights awake": [lambda d: d.sleep(1), lambda d: d.wake_up(["weights"])],
    "level 1, KV cache awake": [lambda d: d.sleep(1), lambda d: d.wake_up(["kv_cache"])],
    "level 2": [lambda d: d.sleep(2)],
    "level 2, weights empty": [lambda d: d.sleep(2), lambda d: d.wake_up(["weights"])],
    "level 2, KV cache awake": [lambda d: d.sleep(2), lambda d: d.wake_up(["kv_cache"])],
    "empty": [lambda d: d.sleep(2), lambda d: d.wake_up()],
}


@pytest.fixture(autouse=True)
def awake_again(daemon: Daemon, model: PreTrainedModel) -> Iterator[None]:
    """Whatever a test leaves behind, the next one finds the engine awake and on weights A."""
    yield
    daemon.wake_up()
    daemon.refit(model)
    assert daemon.status().state is EngineState.READY


@pytest.mark.parametrize("way", list(WAYS))
def test_generation_is_refused_until_all_is_awake(daemon: Daemon, way: str) -> None:
    """In every sleeping state a request gets a typed refusal that says what to do."""
    for operation in WAYS[way]:
        operation(daemon)
    assert daemon.status().state is EngineState.ASLEEP
    with pytest.raises(RefitdError) as refused:
        daemon.generate_one(PROMPT, GREEDY)
    assert refused.value.code is ErrorCode.ASLEEP
    advice = str(refused.value)
    assert ("wake_up(" in advice) is (way != "empty")
    assert ("full refit" in advice) is (way.startswith("level 2") or way == "empty")
    assert "is awake" not in advice


@pytest.mark.parametrize(
    ("way", "partial", "allowed"),
    [
        ("level 1", False, False),
        ("level 1, weights awake", False, True),
        ("level 1, weights awake", True, True),
        ("level 1, KV cache awake", False, False),
        ("level 2", False, False),
        ("level 2, weights empty", False, True),
        ("level 2, weights empty", True, False),
        ("level 2, KV cache awake", False, False),
        ("empty", False, True),
        ("empty", True, False),
    ],
)
def test_weights_are_written_only_where_they_lie(
    daemon: Daemon, model: PreTrainedModel, way: str, partial: bool, allowed: bool
) -> None:
    """A refit needs awake weights, and a full one where they are empty."""
    daemon.refit(model)
    for operation in WAYS[way]:
        operation(daemon)
    version = daemon.status().version
    only = ["model.norm.weight"] if partial else None
    if allowed:
        assert daemon.refit(model, only=only).version == version + 1
    else:
        with pytest.raises(RefitdError) as refused:
            daemon.refit(model, only=only)
        assert refused.value.code is ErrorCode.NOT_ALLOWED_NOW
        assert daemon.status().version == version


def test_wake_weights_refit_wake_cache_serves_the_new_weights(daemon: Daemon, model: PreTrainedModel) -> None:
    """The order a colocated trainer uses: plans survive, and the result is that of an engine that never slept."""
    daemon.refit(model)
    awake = daemon.generate_one(PROMPT, GREEDY)
    daemon.sleep(2)
    assert daemon.status().digest is None
    daemon.wake_up(["weights"])
    report = daemon.refit(model)
    assert report.path == "plan"
    state = daemon.wake_up(["kv_cache"])
    assert state.servable
    sample = daemon.generate_one(PROMPT, GREEDY)
    assert sample.token_ids.tolist() == awake.token_ids.tolist()
    assert sample.version == report.version


def test_waking_up_after_level_2_is_not_enough(daemon: Daemon, model: PreTrainedModel) -> None:
    """The engine refuses to serve what level 2 dropped, until a full refit."""
    daemon.sleep(2)
    state = daemon.wake_up()
    assert not state.servable
    daemon.refit(model)
    assert daemon.status().state is EngineState.READY


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_the_level_of_a_sleep_cannot_be_changed(daemon: Daemon, first: int, second: int) -> None:
    """The same level again changes nothing; another one is refused."""
    daemon.sleep(first)
    assert daemon.sleep(first).level == first
    with pytest.raises(RefitdError) as refused:
        daemon.sleep(second)
    assert refused.value.code is ErrorCode.NOT_ALLOWED_NOW


def test_sleep_with_requests_running_aborts_them_and_says_so(daemon: Daemon) -> None:
    """With policy abort they end as cancelled; with finish they run to their end first."""
    stream = daemon.stream([PROMPT], Sampling(max_tokens=240, ignore_eos=True), incomplete="yield")
    next(stream)
    daemon.sleep(1, policy="abort")
    last = list(stream)[-1]
    assert (last.finish_reason, last.error) == ("cancelled", ErrorCode.ABORTED)
    daemon.wake_up()
    stream = daemon.stream([PROMPT], Sampling(max_tokens=60, ignore_eos=True))
    next(stream)
    daemon.sleep(1, policy="finish")
    assert list(stream)[-1].finish_reason == "length"


def test_requests_cannot_be_kept_over_a_sleep(daemon: Daemon) -> None:
    """Policies that would keep requests are refused before anything happens."""
    with pytest.raises(RefitdError) as refused:
        daemon.sleep(1, policy="keep")
    assert refused.value.code is ErrorCode.UNSUPPORTED
    assert daemon.status().state is EngineState.READY
