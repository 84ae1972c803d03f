"""Requests in flight at a commit, policy by policy, and the prefix cache, which never serves old weights' KV."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import InflightPolicy
from refit_trainer import Daemon, Delta, OutputIncomplete, Sample, Sampling
from tests.conftest import copy_parameters, load_seed
from tests.daemon_process import DaemonProcess
from tests.markov import follows, make_markov
from tests.worker.models import random_model

# Three full blocks of KV cache on CPU (block size 128 would be none): long enough to be cached, short enough for 256.
LONG_PROMPT = list(range(3, 203))
ONE_TOKEN = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=240, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def weights_a_again(daemon: Daemon, model: PreTrainedModel) -> Iterator[None]:
    yield
    load_seed(model, 0)
    daemon.refit(model)


def cold(daemon: Daemon, model: PreTrainedModel, seed: int, prompt: list[int]) -> Sample:
    """What weights `seed` say when nothing was cached: the first sample after a refit that dropped all caches."""
    load_seed(model, seed)
    daemon.refit(model, policy="finish")
    sample = daemon.generate_one(prompt, ONE_TOKEN)
    assert sample.cached_tokens == 0
    return sample


@pytest.mark.parametrize("policy", ["finish", "keep", "recompute", "abort"])
def test_the_prefix_cache_never_serves_old_weights(
    daemon: Daemon, model: PreTrainedModel, policy: InflightPolicy
) -> None:
    """A prompt warmed on A gives, after a refit to B, exactly what a cold B gives, with nothing taken from the
    cache.
    """
    expected = cold(daemon, model, 1, LONG_PROMPT)
    cold(daemon, model, 0, LONG_PROMPT)
    assert daemon.generate_one(LONG_PROMPT, ONE_TOKEN).cached_tokens > 0, "the cache was not warm"
    load_seed(model, 1)
    daemon.refit(model, policy=policy)
    sample = daemon.generate_one(LONG_PROMPT, ONE_TOKEN)
    assert sample.cached_tokens == 0
    assert sample.token_ids.tolist() == expected.token_ids.tolist()
    assert sample.logprobs.tolist() == expected.logprobs.tolist()


def test_a_cache_held_by_a_kept_request_is_not_found_by_new_ones(daemon: Daemon, model: PreTrainedModel) -> None:
    """With keep, a running request holds its old blocks; a new request with the same prompt does not get them."""
    expected = cold(daemon, model, 1, LONG_PROMPT)
    load_seed(model, 0)
    daemon.refit(model)
    following = random_model("qwen3", seed=1)
    stream = daemon.stream([LONG_PROMPT], Sampling(max_tokens=50, ignore_eos=True))
    next(stream)
    copy_parameters(following, model)
    daemon.refit(model, policy="keep")
    sample = daemon.generate_one(LONG_PROMPT, ONE_TOKEN)
    assert sample.cached_tokens == 0
    assert sample.token_ids.tolist() == expected.token_ids.tolist()
    assert list(stream)[-1].finish_reason == "length"


class Running:
    """One long stream on a Markov model, with the permutation of each version."""

    def __init__(self, daemon: Daemon, model: PreTrainedModel) -> None:
        self._daemon = daemon
        self._model = model
        self.successors: dict[int, npt.NDArray[np.int64]] = {}
        self.refit(0, "finish")
        self.stream = daemon.stream([[5]], LONG, incomplete="yield")
        self.deltas: list[Delta] = [next(self.stream)]

    def refit(self, seed: int, policy: InflightPolicy) -> int:
        permutation = make_markov(self._model, seed)
        version = self._daemon.refit(self._model, policy=policy).version
        self.successors[version] = permutation
        return version

    def rest(self) -> list[int]:
        """Reads to the end, checks each token against its version; returns the versions in order of appearance."""
        self.deltas += list(self.stream)
        previous, versions = 5, list[int]()
        for delta in self.deltas:
            tokens = iter(delta.token_ids.tolist())
            for run in delta.versions:
                versions += [run.version] * (run.version not in versions)
                for token in [next(tokens) for _ in range(run.count)]:
                    assert follows(self.successors[run.version], previous, token)
                    previous = token
        return versions

    @property
    def tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)


def test_finish_lets_running_requests_end_on_their_weights(daemon: Daemon, model: PreTrainedModel) -> None:
    """The refit waits; every token of the running request is of the version it began with."""
    running = Running(daemon, model)
    first = max(running.successors)
    running.refit(1, "finish")
    assert running.rest() == [first]
    assert running.tokens == 240


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_keep_and_recompute_go_on_under_the_new_weights(
    daemon: Daemon, model: PreTrainedModel, policy: InflightPolicy
) -> None:
    """The running request is frozen and goes on; its tokens say where the border is, and none is lost."""
    running = Running(daemon, model)
    first = max(running.successors)
    second = running.refit(1, policy)
    assert running.rest() == [first, second]
    assert running.tokens == 240


def test_recompute_builds_its_cache_anew(daemon: Daemon, model: PreTrainedModel) -> None:
    """After recompute a running request's next tokens are what new weights say of its whole text, not of old KV."""
    load_seed(model, 0)
    daemon.refit(model)
    # Made before the request runs, which is over soon.
    following = random_model("qwen3", seed=1)
    stream = daemon.stream([LONG_PROMPT], Sampling(max_tokens=50, temperature=0.0, ignore_eos=True))
    received = [next(stream)]
    copy_parameters(following, model)
    version = daemon.refit(model, policy="recompute").version
    received += list(stream)
    runs = [run for delta in received for run in delta.versions]
    before = sum(run.count for run in runs if run.version < version)
    tokens = [token for delta in received for token in delta.token_ids.tolist()]
    assert 0 < before < len(tokens)
    fresh = daemon.generate_one(
        [*LONG_PROMPT, *tokens[:before]], Sampling(max_tokens=3, temperature=0, ignore_eos=True)
    )
    assert tokens[before : before + 3] == fresh.token_ids.tolist()


def test_abort_ends_running_requests_with_what_they_have(daemon: Daemon, model: PreTrainedModel) -> None:
    """They end as cancelled, and say by what; their tokens so far are delivered, all of the old version."""
    running = Running(daemon, model)
    first = max(running.successors)
    running.refit(1, "abort")
    assert running.rest() == [first]
    assert (running.deltas[-1].finish_reason, running.deltas[-1].error) == ("cancelled", ErrorCode.ABORTED)
    assert running.tokens < 240


def test_a_stream_that_is_aborted_raises_behind_its_last_tokens(daemon: Daemon, model: PreTrainedModel) -> None:
    """It yields what there is, the end with its reason too; only then it says that this was not all."""
    stream = daemon.stream([[5]], LONG)
    received = [next(stream)]
    daemon.refit(model, policy="abort")
    with pytest.raises(OutputIncomplete) as cut_off:
        received.extend(stream)
    assert received[-1].finish_reason == "cancelled"
    assert (cut_off.value.code, cut_off.value.samples) == (ErrorCode.ABORTED, ())
    assert list(stream) == []


def test_requests_that_come_right_through_updates_fit_their_version(
    daemon: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel
) -> None:
    """Requests that keep coming during many refits wait at the gate and are served; no token contradicts its
    version.
    """
    permutations = {}

    def refit(seed: int) -> None:
        permutation = make_markov(model, seed)
        permutations[daemon.refit(model).version] = permutation

    refit(0)
    samples: list[Sample] = []
    enough = threading.Event()

    def ask() -> None:
        with daemon_process.connect() as other:
            while not enough.is_set():
                samples.extend(other.generate([[token] for token in range(8)], ONE_TOKEN))

    asking = threading.Thread(target=ask)
    asking.start()
    for seed in range(1, 21):
        refit(seed)
    enough.set()
    asking.join(60)
    assert len({sample.versions[0].version for sample in samples}) > 1, "no request met an update"
    for sample in samples:
        previous = sample.prompt
        tokens = iter(sample.token_ids.tolist())
        for run in sample.versions:
            for token in [next(tokens) for _ in range(run.count)]:
                assert follows(permutations[run.version], previous, token)
                previous = token


def test_a_request_can_demand_a_version(daemon: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel) -> None:
    """`min_version` waits for the refit that brings it, and is served by it or a later one."""
    served = daemon.refit(model).version
    outcome: list[Sample] = []

    def ask() -> None:
        with daemon_process.connect() as other:
            outcome.append(other.generate_one([5], ONE_TOKEN, min_version=served + 1))

    asking = threading.Thread(target=ask)
    asking.start()
    while daemon.status().waiting_requests == 0:
        assert asking.is_alive()
    daemon.refit(model)
    asking.join(60)
    assert outcome[0].versions[0].version == served + 1


def test_resetting_the_cache_while_it_is_held_is_an_error(daemon: Daemon) -> None:
    """vLLM answers such a reset with False: the daemon does not call that a success."""
    stream = daemon.stream([LONG_PROMPT], Sampling(max_tokens=50, ignore_eos=True))
    next(stream)
    with pytest.raises(Exception, match="cache_not_reset"):
        daemon.reset_prefix_cache()
    stream.cancel()
    list(stream)
    daemon.reset_prefix_cache()
