"""Three real daemons, one trainer: one version for all or for none, with one of them killed at the worst moment."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.states import EngineState
from refit_trainer import (
    Delta,
    Fleet,
    FleetRefitFailed,
    FleetRefitRefused,
    MemberLost,
    MemberState,
    NotShareable,
    Sampling,
    share_parameters,
)
from refit_trainer.names import checkpoint_tensors
from tests.conftest import GREEDY, PROMPT, load_seed
from tests.daemon_process import DaemonProcess, start_daemon
from tests.fleet.dying_trainer import Moment, start_dying_trainer
from tests.test_held_refits import wait_until_restored
from tests.trainers import SMALL_BUCKET_BYTES
from tests.worker.models import random_model

SETTINGS = ("refit.keep_last=host", "engine.max_num_seqs=16", "engine.tokenizer=false")
LONG = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
Tokens = tuple[list[int], list[float]]
PROMPTS = [[7 + index, 60, 9 + index, 400, 9] for index in range(24)]


@dataclass
class Trio:
    """The session's daemon, which is not to be harmed, and two that can be killed, and started again on their paths."""

    model: Path
    directory: Path
    processes: list[DaemonProcess]

    @property
    def endpoints(self) -> list[str]:
        return [process.endpoint for process in self.processes]

    def start(self) -> None:
        self.processes += [start_daemon(self.model, self.directory / str(number), *SETTINGS) for number in (1, 2)]
        for process in self.processes:
            process.wait_ready()

    def kill(self, number: int) -> None:
        """Returns when it has ended."""
        assert number > 0, "the session's daemon has other tests to serve"
        self.processes[number].process.send_signal(signal.SIGKILL)
        self.processes[number].process.wait()

    def restart(self, number: int) -> None:
        self.processes[number] = start_daemon(self.model, self.directory / str(number), *SETTINGS)
        self.processes[number].wait_ready()

    def stop(self) -> None:
        for process in self.processes[1:]:
            process.stop()

    def fleet(self, **options: object) -> Fleet:
        return Fleet.connect(self.endpoints, bucket_bytes=SMALL_BUCKET_BYTES, **options)


@pytest.fixture(scope="module")
def trio(
    daemon_process: DaemonProcess, fresh_sample: Tokens, model_path: Path, short_directory: Path
) -> Iterator[Trio]:
    assert fresh_sample, "asked for before anything is refitted"
    started = Trio(model_path, short_directory / "trio", [daemon_process])
    with ExitStack() as stack:
        stack.callback(started.stop)
        started.start()
        yield started


@pytest.fixture(scope="module")
def shared() -> PreTrainedModel:
    """One trainer's model for the whole module."""
    return share_parameters(random_model("qwen3", seed=0))


@pytest.fixture
def fleet(trio: Trio) -> Iterator[Fleet]:
    with trio.fleet() as connected:
        yield connected


Answer = tuple[list[int], list[float], str | None, int]


def answers(trio: Trio, *numbers: int) -> list[Answer]:
    """Greedy ids and logprobs, digest and version of each of them."""
    said = []
    for number in numbers or range(3):
        with trio.processes[number].connect() as daemon:
            sample, status = daemon.generate_one(PROMPT, GREEDY), daemon.status()
            said.append((sample.token_ids.tolist(), sample.logprobs.tolist(), status.digest, status.version))
    return said


def generated(fleet: Fleet) -> dict[str, int]:
    """Tokens that each member has made in its life."""
    return {member.endpoint: member.status.generated_tokens for member in fleet.status().members if member.status}


def tensors_then(model: PreTrainedModel, happening: object, after: int = 12) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors; `happening()` in the middle of them."""
    for index, named in enumerate(checkpoint_tensors(model).items()):
        if index == after:
            happening()  # type: ignore[operator]
        yield named


def streamed_to_the_end(deltas: list[Delta]) -> set[int]:
    """The prompts that have all their tokens; none came twice."""
    tokens: Counter[int] = Counter()
    for delta in deltas:
        assert delta.position == tokens[delta.prompt]
        tokens[delta.prompt] += len(delta.token_ids)
    return {prompt for prompt, count in tokens.items() if count == LONG.max_tokens}


# --- refits ---


def test_all_serve_the_same_weights_after_a_refit(
    trio: Trio, fleet: Fleet, shared: PreTrainedModel, fresh_sample: Tokens
) -> None:
    """A, B, A, in place: ids, logprobs and digest of all three are equal each time, and A is A as it was loaded."""
    for seed in (0, 1, 0):
        load_seed(shared, seed)
        report = fleet.refit(shared)
        assert sorted(report.reports) == sorted(trio.endpoints)
        assert not report.left_out
        said = answers(trio)
        assert len({str(answer) for answer in said}) == 1
        assert said[0][2:] == (report.digest, report.version)
        assert (said[0][:2] == fresh_sample) == (seed == 0)
    status = fleet.status()
    assert [member.state for member in status.members] == [MemberState.SERVING] * 3
    assert status.digests_agree


def test_buckets_are_packed_once_and_read_by_all(trio: Trio, fleet: Fleet, shared: PreTrainedModel) -> None:
    """The iterator is consumed once; all three hold what came, under hold and without."""
    for policy, seed in (("leave_out", 1), ("restore", 0)):
        load_seed(shared, seed)
        with trio.fleet(on_failure=policy) as bucketed:
            fleet.acquire_writer(takeover=True)
            bucketed.acquire_writer(takeover=True)
            report = bucketed.refit(iter(checkpoint_tensors(shared).items()))
        said = answers(trio)
        assert len({str(answer) for answer in said}) == 1
        assert said[0][2:] == (report.digest, report.version)
        with trio.processes[2].connect() as daemon:
            assert daemon.verify(shared, full=True)


def test_what_one_would_refuse_is_done_nowhere(trio: Trio, fleet: Fleet, shared: PreTrainedModel) -> None:
    """Validated on all before the first write: values, names, versions."""
    fleet.refit(shared)
    before = answers(trio)
    with torch.no_grad():
        kept = shared.lm_head.weight[3, 5].clone()
        shared.lm_head.weight[3, 5] = float("nan")
    with pytest.raises(FleetRefitRefused) as refused:
        fleet.refit(shared, check_finite=True)
    with torch.no_grad():
        shared.lm_head.weight[3, 5] = kept
    assert {error.code for error in refused.value.errors.values()} == {ErrorCode.NOT_FINITE}
    with trio.processes[1].connect() as ahead:
        for change in ({"version": fleet.version}, {"only": ["no.such.tensor"]}):
            with pytest.raises(FleetRefitRefused):
                fleet.refit(shared, **change)
        assert ahead.status().state is EngineState.READY
    assert answers(trio) == before


def test_all_or_none_when_one_drops_out_after_the_first_write(trio: Trio, shared: PreTrainedModel) -> None:
    """With "restore": another trainer takes one daemon over in the middle. All three serve exactly what they did."""
    with trio.fleet(on_failure="restore") as fleet:
        fleet.acquire_writer(takeover=True)
        load_seed(shared, 0)
        fleet.refit(shared)
        before = answers(trio)
        load_seed(shared, 1)

        def take_over() -> None:
            with trio.processes[1].connect() as rival:
                rival.acquire_writer(takeover=True)

        with pytest.raises(FleetRefitFailed) as failed:
            fleet.refit(tensors_then(shared, take_over))
        assert list(failed.value.errors) == [trio.endpoints[1]]
        assert answers(trio) == before
        report = fleet.refit(shared)
        assert len(report.reports) == 3
        assert len({str(answer) for answer in answers(trio)}) == 1


@pytest.mark.parametrize("moment", ["validated", "held"])
def test_a_trainer_killed_between_two_phases_changes_nothing(
    trio: Trio, fleet: Fleet, shared: PreTrainedModel, moment: Moment
) -> None:
    """Before the decision that is none: all three serve what they served, also where every byte had been written."""
    fleet.acquire_writer(takeover=True)
    load_seed(shared, 0)
    fleet.refit(shared)
    before = answers(trio)
    assert start_dying_trainer(trio.endpoints, 1, moment).wait(120) == -signal.SIGKILL
    for process in trio.processes:
        with process.connect() as daemon:
            wait_until_restored(daemon)
    assert answers(trio) == before


def test_a_trainer_killed_after_its_decision_leaves_whole_versions(
    trio: Trio, fleet: Fleet, shared: PreTrainedModel
) -> None:
    """One daemon had been told to publish, the others put their weights back. No batch mixes the two, and the next
    trainer sees who is behind and mends it.
    """
    fleet.acquire_writer(takeover=True)
    load_seed(shared, 0)
    old = fleet.refit(shared).version
    before = answers(trio)
    assert start_dying_trainer(trio.endpoints, 1, "published by one").wait(120) == -signal.SIGKILL
    for process in trio.processes:
        with process.connect() as daemon:
            wait_until_restored(daemon)
    status = fleet.status()
    assert status.version == old + 1
    assert len(status.serving) == 1
    assert sorted(answer[3] for answer in answers(trio)) == [old, old, old + 1]
    assert all(answer == before[0] for answer in answers(trio) if answer[3] == old)
    assert {sample.version for sample in fleet.generate(PROMPTS, GREEDY)} == {old + 1}
    fleet.acquire_writer(takeover=True)
    assert len(fleet.refit(shared).reports) == 3
    assert len({str(answer) for answer in answers(trio)}) == 1


def test_partial_refit_is_not_given_to_one_that_is_behind(trio: Trio, fleet: Fleet, shared: PreTrainedModel) -> None:
    """It would serve a mixture; it is left out, and the next full refit brings it back."""
    fleet.acquire_writer(takeover=True)
    load_seed(shared, 0)
    fleet.leave_out(trio.endpoints[0])
    fleet.refit(shared)
    fleet.take_in(trio.endpoints[0])
    assert fleet.status().members[0].state is MemberState.BEHIND
    partial = fleet.refit(shared, only=["model.norm.weight"])
    assert list(partial.left_out) == [trio.endpoints[0]]
    assert not fleet.refit(shared).left_out
    assert len({str(answer) for answer in answers(trio)}) == 1


def test_memory_is_not_lent_over_tcp(trio: Trio, shared: PreTrainedModel) -> None:
    """Refused at once, with the way that there is; nobody is refitted."""
    with Fleet.connect([trio.endpoints[0], "tcp://127.0.0.1:9"], 1.0, probe_seconds=0.5) as fleet:
        version = fleet.version
        with pytest.raises(NotShareable, match="collective"):
            fleet.refit(shared)
        assert fleet.status().version == version


# --- generation ---


def test_generation_is_spread_and_groups_stay_together(fleet: Fleet, shared: PreTrainedModel) -> None:
    """Every output of every prompt once, by all three daemons; one group's prompts always by the same one."""
    fleet.acquire_writer(takeover=True)
    version = fleet.refit(shared).version
    before = generated(fleet)
    samples = list(fleet.generate(PROMPTS, Sampling(n=2, max_tokens=8, ignore_eos=True)))
    assert sorted((s.prompt, s.output) for s in samples) == [(p, o) for p in range(len(PROMPTS)) for o in range(2)]
    assert {sample.version for sample in samples} == {version}
    after = generated(fleet)
    assert all(after[name] > before[name] for name in after)
    for _ in range(3):
        list(fleet.generate(PROMPTS[:4], GREEDY, groups=["one", "one", "one", "one"]))
    assert sum(generated(fleet)[name] > after[name] for name in after) == 1


def test_a_refit_waits_for_batches_of_the_version_before(fleet: Fleet, shared: PreTrainedModel) -> None:
    """Asked for in the middle of a batch: the batch is of one version to its end, the next one is of the new one."""
    fleet.acquire_writer(takeover=True)
    first = fleet.refit(shared).version
    batch = fleet.generate(PROMPTS[:6], LONG)
    second = fleet.refit(shared, policy="keep").version
    assert {sample.version for sample in batch} == {first}
    assert {sample.version for sample in fleet.generate(PROMPTS[:6], GREEDY)} == {second}
    batch = fleet.generate(PROMPTS[:6], LONG)
    with pytest.raises(FleetRefitRefused, match="batches"):
        fleet.refit(shared, deadline_seconds=0.01)
    assert {sample.version for sample in batch} == {second}


# --- deaths; from here on the daemons are fewer ---


def test_one_killed_in_a_refit_is_left_out_and_catches_up(trio: Trio, shared: PreTrainedModel) -> None:
    """SIGKILL in the middle of the buckets: the others commit. Restarted on its path it is behind, and is brought to
    the very same version from the trainer's memory, while nothing else is refitted; changed weights are refused.
    """
    with trio.fleet(on_failure="leave_out") as fleet:
        fleet.acquire_writer(takeover=True)
        load_seed(shared, 1)
        report = fleet.refit(tensors_then(shared, lambda: trio.kill(1)))
        assert list(report.left_out) == [trio.endpoints[1]]
        assert len(report.reports) == 2
        assert [member.state for member in fleet.status().members] == [
            MemberState.SERVING,
            MemberState.DOWN,
            MemberState.SERVING,
        ]
        assert {s.version for s in fleet.generate(PROMPTS, GREEDY)} == {report.version}
        trio.restart(1)
        status = fleet.status()
        assert status.members[1].state is MemberState.BEHIND
        assert status.version == report.version
        load_seed(shared, 2)
        with pytest.raises(FleetRefitRefused):
            fleet.catch_up(shared)
        load_seed(shared, 1)
        caught = fleet.catch_up(shared)
        assert list(caught.reports) == [trio.endpoints[1]]
        assert caught.version == report.version
        said = answers(trio)
        assert len({str(answer) for answer in said}) == 1
        assert said[0][2:] == (report.digest, report.version)
        assert not fleet.catch_up(shared).reports


def test_one_killed_in_a_generation_is_replaced_by_others(trio: Trio, shared: PreTrainedModel) -> None:
    """Every sample still comes, whole and of one version; a stream that had begun there ends with a typed error that
    names its prompts; with "restore" the next refit says who is missing.
    """
    with trio.fleet(on_failure="restore") as fleet:
        fleet.acquire_writer(takeover=True)
        version = fleet.refit(shared).version
        expected = {sample.prompt: sample.token_ids.tolist() for sample in fleet.generate(PROMPTS, LONG)}
        stream = fleet.stream(PROMPTS, LONG)
        batch = fleet.generate(PROMPTS, LONG)
        deltas = [*islice(stream, 60)]
        trio.kill(2)
        samples = list(batch)
        assert sorted(sample.prompt for sample in samples) == sorted(expected)
        assert {len(sample.token_ids) for sample in samples} == {LONG.max_tokens}
        # Rounding depends on what is batched together, so some of them part ways on their way to 200 tokens.
        same = [sample for sample in samples if sample.token_ids.tolist() == expected[sample.prompt]]
        assert len(same) > len(samples) / 2
        assert {sample.version for sample in samples} == {version}
        with pytest.raises(MemberLost) as lost:
            deltas.extend(stream)
        assert lost.value.details["endpoint"] == trio.endpoints[2]
        assert streamed_to_the_end(deltas) == {*range(len(PROMPTS))} - {*lost.value.details["prompts"]}
        before = answers(trio, 0, 1)
        with pytest.raises(FleetRefitRefused) as refused:
            fleet.refit(shared)
        assert list(refused.value.errors) == [trio.endpoints[2]]
        assert answers(trio, 0, 1) == before


def test_one_killed_in_a_refit_of_all_or_none(trio: Trio, shared: PreTrainedModel) -> None:
    """With "restore" the one that is left serves exactly what it served, and can be refitted without the dead ones."""
    with trio.fleet(on_failure="restore", probe_seconds=0.5) as fleet:
        fleet.leave_out(trio.endpoints[2])
        fleet.acquire_writer(takeover=True)
        fleet.refit(shared)
        before = answers(trio, 0)
        load_seed(shared, 0)
        with pytest.raises(FleetRefitFailed) as failed:
            fleet.refit(tensors_then(shared, lambda: trio.kill(1)))
        assert list(failed.value.errors) == [trio.endpoints[1]]
        assert answers(trio, 0) == before
        fleet.leave_out(trio.endpoints[1])
        report = fleet.refit(shared)
        assert list(report.reports) == [trio.endpoints[0]]
        assert answers(trio, 0)[0][3] == report.version > before[0][3]
