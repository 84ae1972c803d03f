"""Case A at tensor parallel size 2, through the whole daemon: two workers, one answer, never half of a refit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.states import EngineState
from refit_trainer import Daemon, RefitdError
from tests.daemon_process import DaemonProcess, standing_still
from tests.parallel.engines import (
    Said,
    load,
    odd_model,
    said,
    shared_model,
    transformers_logprobs,
    wait_until_refitting,
    worker_pids,
)

# One process sums a row-parallel layer in one go, two ranks in two: that much bf16 may differ.
LOGPROB_TOLERANCE = 0.15
LOOKS = 300

pytestmark = pytest.mark.slow


@pytest.fixture
def daemon(two_ranks: DaemonProcess, fresh: Said) -> Iterator[Daemon]:
    with two_ranks.connect() as connected:
        yield connected


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The trainer's, weights A, its parameters shared."""
    return shared_model()


def test_in_place_refits_are_exact(daemon: Daemon, model: PreTrainedModel, fresh: Said) -> None:
    """O1: after A, B, A the engine says what it said when started on A, and each time holds every element of the
    trainer's: padded vocabulary and strided row-parallel slices too."""
    for seed in (0, 1, 0):
        load(model, seed)
        report = daemon.refit(model, attest="full")
        assert report.path == "plan"
        assert daemon.verify(model, full=True)
        assert (said(daemon) == fresh) is (seed == 0)


def test_bucket_refits_are_exact(two_ranks: DaemonProcess, model: PreTrainedModel, fresh: Said) -> None:
    """O1 for buckets so small that most tensors are cut, some in the middle of a row."""
    with two_ranks.connect(bucket_bytes=24_000) as daemon:
        for seed in (1, 0):
            load(model, seed)
            daemon.refit(iter(model.named_parameters()))
            assert daemon.verify(model, full=True)
        assert said(daemon) == fresh


def test_two_ranks_agree_with_one_process(daemon: Daemon, model: PreTrainedModel) -> None:
    """Logprobs after a refit to B are those of the trainer's own forward pass, up to the dtype."""
    load(model, 1)
    daemon.refit(model)
    token_ids, logprobs = said(daemon)
    difference = torch.tensor(logprobs) - transformers_logprobs(model, token_ids)
    assert difference.abs().max() < LOGPROB_TOLERANCE


def test_the_ack_comes_only_after_every_rank(two_ranks: DaemonProcess, daemon: Daemon, model: PreTrainedModel) -> None:
    """While one rank stands still the commit is not acknowledged, and nothing is served; the trainer, which overwrites
    its memory at the ack, never shows the other rank a byte of what it wrote."""
    load(model, 1)
    daemon.refit(model)
    of_b = said(daemon)
    load(model, 0)
    daemon.refit(model)
    load(model, 1)

    def refit_and_overwrite() -> None:
        daemon.refit(model)
        load(model, 2)

    for delayed in worker_pids(two_ranks):
        with two_ranks.connect() as looking, ThreadPoolExecutor(1) as pool:
            version = looking.status().version
            with standing_still(delayed):
                refit = pool.submit(refit_and_overwrite)
                wait_until_refitting(looking, refit)
                for _ in range(LOOKS):
                    status = looking.status()
                    assert (status.state, status.version) == (EngineState.REFITTING, version)
                assert not refit.done()
            refit.result()
            assert looking.status().version == version + 1
        assert said(daemon) == of_b
        load(model, 1)


def test_a_rank_that_fails_after_the_first_write_leaves_all_closed(
    two_ranks: DaemonProcess, daemon: Daemon, model: PreTrainedModel, fresh: Said
) -> None:
    """A NaN that only the second rank holds fails there once all has been written: nothing is served, neither rank's
    half, until a full refit has reached both."""
    load(model, 0)
    broken = odd_model(1)
    with torch.no_grad():
        broken.model.layers[1].self_attn.o_proj.weight[3, -1] = float("nan")
    version = daemon.status().version
    with pytest.raises(RefitdError) as failed:
        daemon.refit(iter(broken.named_parameters()), check_finite=True)
    assert failed.value.code is ErrorCode.NOT_FINITE
    assert "layers.1.self_attn.o_proj" in failed.value.message
    status = daemon.status()
    assert (status.state, status.version, status.digest) == (EngineState.TORN, version, None)
    with pytest.raises(RefitdError) as refused:
        said(daemon)
    assert refused.value.code is ErrorCode.TORN
    daemon.refit(model)
    assert said(daemon) == fresh


def test_ranks_that_read_different_bytes_are_found_out(
    two_ranks: DaemonProcess, daemon: Daemon, model: PreTrainedModel, fresh: Said
) -> None:
    """A trainer that overwrites its memory before the ack gives two ranks two models: that is noticed, and never
    served. (Where the rank that runs is slow too, both read the same in the end, and that is what is served.)"""
    load(model, 0)
    daemon.refit(model)
    load(model, 1)
    with two_ranks.connect() as looking, ThreadPoolExecutor(1) as pool:
        with standing_still(worker_pids(two_ranks)[1]):
            refit = pool.submit(daemon.refit, model)
            wait_until_refitting(looking, refit)
            for _ in range(LOOKS):
                assert looking.status().state is EngineState.REFITTING
            load(model, 2)
        error = refit.exception()
    if error is None:
        assert daemon.verify(model, full=True)
    else:
        assert isinstance(error, RefitdError)
        assert error.code is ErrorCode.ATTEST_FAILED
        assert daemon.status().state is EngineState.TORN
    load(model, 0)
    daemon.refit(model)
    assert said(daemon) == fresh
