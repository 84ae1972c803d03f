"""Two pipeline stages: each holds some layers, tied embeddings both, and only together they are the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_trainer import Daemon, RefitdError, Sampling
from tests.canary import unharmed
from tests.conftest import PROMPT
from tests.daemon_process import DaemonProcess
from tests.parallel.engines import Said, load, odd_model, parallel_daemon, said, shared_model

KIND = "qwen3_tied"
IN_THE_SECOND_STAGE = "model.layers.1.mlp.down_proj.weight"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_stages(short_directory: Path) -> Iterator[DaemonProcess]:
    with parallel_daemon(short_directory / "pp", KIND, "engine.pipeline_parallel_size=2") as process:
        yield process


@pytest.fixture(scope="module")
def fresh(two_stages: DaemonProcess) -> Said:
    """What the engine says as it was started, on weights A."""
    with two_stages.connect() as connected:
        assert connected.status().version == 0
        return said(connected)


@pytest.fixture
def daemon(two_stages: DaemonProcess, fresh: Said) -> Iterator[Daemon]:
    with two_stages.connect() as connected:
        yield connected


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return shared_model(KIND)


def test_refits_of_both_kinds_are_exact(daemon: Daemon, model: PreTrainedModel, fresh: Said) -> None:
    """O1: A, B, A in place and B, A through buckets; every element is there, the tied embedding on both stages."""
    for seed, in_place in ((0, True), (1, True), (0, True), (1, False), (0, False)):
        load(model, seed, KIND)
        daemon.refit(model if in_place else iter(model.named_parameters()), attest="full")
        assert daemon.verify(model, full=True)
        assert (said(daemon) == fresh) is (seed == 0)


def test_a_tied_head_may_be_sent_if_it_is_equal(daemon: Daemon, model: PreTrainedModel, fresh: Said) -> None:
    """Also to the stages that have no head: the same values are accepted, others are refused."""
    tensors = {name: value.detach() for name, value in odd_model(0, KIND).named_parameters()}
    daemon.refit({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert said(daemon) == fresh
    with pytest.raises(RefitdError) as refused:
        daemon.refit({**tensors, "lm_head.weight": -tensors["model.embed_tokens.weight"]})
    assert refused.value.code is ErrorCode.MANIFEST_MISMATCH
    load(model, 0, KIND)
    daemon.refit(model)


def test_what_is_missing_is_judged_over_all_stages(daemon: Daemon, model: PreTrainedModel) -> None:
    """The manifest demands the layers of both stages, and a full refit without one of the second is refused."""
    load(model, 0, KIND)
    daemon.refit(model)
    assert not [tensor.name for tensor in daemon.manifest().tensors if tensor.optional and tensor.alias_of is None]
    tensors = {name: value for name, value in odd_model(1, KIND).named_parameters() if name != IN_THE_SECOND_STAGE}
    with unharmed(daemon), pytest.raises(RefitdError) as refused:
        daemon.refit(tensors)
    assert refused.value.code is ErrorCode.MANIFEST_MISMATCH
    assert refused.value.details["missing"] == [IN_THE_SECOND_STAGE]


def test_a_partial_refit_of_one_stage(daemon: Daemon, model: PreTrainedModel) -> None:
    """Tensors that only the second stage holds can be replaced alone."""
    load(model, 0, KIND)
    daemon.refit(model)
    load(model, 1, KIND)
    partial = daemon.refit(model, only=[IN_THE_SECOND_STAGE])
    after = said(daemon)
    other = odd_model(0, KIND)
    other.get_parameter(IN_THE_SECOND_STAGE).data.copy_(model.get_parameter(IN_THE_SECOND_STAGE))
    assert daemon.refit(iter(other.named_parameters())).digest == partial.digest
    assert said(daemon) == after


def test_requests_between_the_stages_belong_to_one_version(daemon: Daemon, model: PreTrainedModel) -> None:
    """Streams that are under way go on under the new weights; a batch that is in the pipeline is finished before."""
    streams = [daemon.stream([PROMPT], Sampling(max_tokens=200, ignore_eos=True)) for _ in range(4)]
    received = [[next(stream)] for stream in streams]
    version = daemon.refit(model, policy="keep").version
    for deltas, stream in zip(received, streams, strict=True):
        deltas += list(stream)
        runs = [run for delta in deltas for run in delta.versions]
        assert sum(run.count for run in runs) == 200
        assert [run.version for run in runs] == sorted(run.version for run in runs)
        assert {run.version for run in runs} <= {version - 1, version}
