"""Refits by broadcast over gloo: the engine holds exactly what a trainer elsewhere sent."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import InflightPolicy
from refit_trainer import (
    AsyncDaemon,
    BroadcastGroup,
    ClientClosed,
    Daemon,
    Delta,
    LayoutMismatch,
    RefitdError,
    Sampling,
)
from tests.canary import unharmed
from tests.cases.test_torn import AFTER_THREE_BUCKETS, failing_after
from tests.cases.test_updates import tensors_of
from tests.conftest import GREEDY, PROMPT, load_seed
from tests.daemon_process import DaemonProcess
from tests.markov import follows, make_markov
from tests.ports import reserved_port
from tests.trainers import specs_of
from tests.worker.models import random_model


def test_refits_are_exact_from_a_to_b_and_back(
    daemon: Daemon, model: PreTrainedModel, fresh_sample: tuple[list[int], list[float]]
) -> None:
    """Greedy ids and logprobs of A, B, A are those of a fresh engine and of in-place refits; so are the digests."""
    digests = {}
    for seed in (0, 1):
        load_seed(model, seed)
        digests[seed] = daemon.refit(model).digest
    other = daemon.generate_one(PROMPT, GREEDY)
    expected = {0: fresh_sample, 1: (other.token_ids.tolist(), other.logprobs.tolist())}
    with daemon.collective() as group:
        for seed in (0, 1, 0):
            report = group.refit(tensors_of(seed))
            sample = daemon.generate_one(PROMPT, GREEDY)
            assert (sample.token_ids.tolist(), sample.logprobs.tolist()) == expected[seed]
            assert report.digest == digests[seed]
            assert report.path == "plan"
            assert daemon.verify(tensors_of(seed), full=True)
            assert sample.version == report.version


@pytest.fixture
def in_place(daemon: Daemon, model: PreTrainedModel) -> str:
    """The digest of weights B as a proven way puts them there; the engine holds A when the test begins."""
    load_seed(model, 1)
    digest = daemon.refit(model).digest
    assert digest is not None
    load_seed(model, 0)
    daemon.refit(model)
    return digest


@pytest.mark.parametrize("bucket_bytes", [4096, (64 << 10) + 64, 1 << 20, 64 << 20])
def test_pieces_of_any_size_give_the_same(daemon: Daemon, in_place: str, bucket_bytes: int) -> None:
    """Tensors larger than a piece are split, wherever that falls; one group serves many refits."""
    with daemon.collective(bucket_bytes=bucket_bytes) as group:
        for seed in (1, 0, 1):
            digest = group.refit(tensors_of(seed)).digest
        assert digest == in_place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_float_dtypes_are_cast_as_torch_casts(daemon: Daemon, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """A trainer in another dtype gets what `.to(engine dtype)` of its weights would give."""
    source = tensors_of(1, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source[name].to(torch.bfloat16))
    expected = daemon.refit(model).digest
    with daemon.collective() as group:
        group.refit(tensors_of(0))
        assert group.refit(source).digest == expected


def test_order_never_matters(daemon: Daemon, in_place: str) -> None:
    """A mapping in any order gives the same model."""
    tensors = list(tensors_of(1).items())
    random.Random(7).shuffle(tensors)
    with daemon.collective(bucket_bytes=64 << 10) as group:
        assert group.refit(dict(tensors)).digest == in_place


def test_what_is_announced_may_change_from_one_refit_to_the_next(daemon: Daemon, in_place: str) -> None:
    """The same twice, another order, the same order again, a part alone, another dtype: none is taken for another."""
    tensors = tensors_of(1)
    turned = dict(reversed(tensors.items()))
    first, *_ = tensors
    with daemon.collective(bucket_bytes=64 << 10) as group:
        for weights in (tensors, tensors, turned, turned, tensors):
            group.refit(tensors_of(0))
            assert group.refit(weights).digest == in_place
            assert group.refit(weights).digest == in_place
        group.refit(tensors_of(0))
        group.refit(tensors, only=[first])
        group.refit(tensors, only=[first])
        assert group.refit({name: tensor.float() for name, tensor in tensors.items()}).digest == in_place
        assert group.refit(tensors).digest == in_place


def test_modules_iterators_and_strided_tensors_can_be_sent(daemon: Daemon, in_place: str) -> None:
    """An iterator with its specs; transposed memory; a plain module."""
    model = random_model("qwen3", seed=1)
    strided = {name: value.t().contiguous().t() if value.ndim == 2 else value for name, value in tensors_of(1).items()}
    with daemon.collective(bucket_bytes=16 << 10) as group:
        for weights, specs in ((model, None), (strided, None), (iter(tensors_of(1).items()), specs_of())):
            group.refit(tensors_of(0))
            assert group.refit(weights, specs).digest == in_place


def test_a_partial_refit_changes_exactly_what_it_names(daemon: Daemon, model: PreTrainedModel) -> None:
    only = "model.layers.0.self_attn.q_proj.weight"
    with daemon.collective() as group:
        group.refit(tensors_of(0))
        partial = group.refit(tensors_of(1), only=[only])
    assert partial.partial
    assert partial.tensors == 1
    load_seed(model, 0)
    with torch.no_grad():
        model.get_parameter(only).copy_(tensors_of(1)[only])
    assert daemon.refit(model).digest == partial.digest


def test_versions_policies_and_attestation_are_those_of_every_refit(daemon: Daemon) -> None:
    """The version may jump but not fall; what was asked for is in the report."""
    with daemon.collective() as group:
        served = daemon.status().version
        report = group.refit(tensors_of(1), version=served + 5, policy="recompute", attest="full", check_finite=True)
        assert (report.version, report.policy, daemon.status().digest_mode) == (served + 5, "recompute", "full")
        with unharmed(daemon), pytest.raises(RefitdError) as refused:
            group.refit(tensors_of(0), version=served + 5)
        assert refused.value.code is ErrorCode.VERSION_NOT_INCREASING
        assert group.refit(tensors_of(0)).version == served + 6


@pytest.mark.parametrize("policy", ["keep", "recompute", "finish", "abort"])
def test_running_requests_meet_a_refit_as_the_policy_says(
    daemon: Daemon, model: PreTrainedModel, policy: InflightPolicy
) -> None:
    """Every token belongs to the weights whose version it is stamped with; `keep` and `recompute` go on."""
    successors = {}
    with daemon.collective(bucket_bytes=64 << 10) as group:
        permutation = make_markov(model, 0)
        successors[group.refit(model).version] = permutation
        stream = daemon.stream([[5]], Sampling(max_tokens=240, temperature=0.0, ignore_eos=True), incomplete="yield")
        received = [next(stream)]
        permutation = make_markov(model, 1)
        successors[group.refit(model, policy=policy).version] = permutation
        received += list(stream)
    versions = check_successors(received, successors)
    assert len(versions) == (2 if policy in ("keep", "recompute") else 1)
    assert received[-1].finish_reason == ("cancelled" if policy == "abort" else "length")


def check_successors(received: list[Delta], successors: dict[int, npt.NDArray[np.int64]]) -> list[int]:
    """Each token against the weights of its version; returns the versions in order of appearance."""
    previous, versions = 5, list[int]()
    for delta in received:
        tokens = iter(delta.token_ids.tolist())
        for run in delta.versions:
            versions += [run.version] * (run.version not in versions)
            for token in [next(tokens) for _ in range(run.count)]:
                assert follows(successors[run.version], previous, token)
                previous = token
    return versions


def test_other_ranks_of_the_trainer_attend(daemon: Daemon, in_place: str) -> None:
    """A trainer of two processes: rank 0 sends, rank 1 only takes part."""
    with reserved_port() as port, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(BroadcastGroup.join, "127.0.0.1", port, 1, 3)
        with daemon.collective(port=port, trainer_ranks=2, bucket_bytes=64 << 10) as group, joining.result() as other:
            attending = pool.submit(other.attend, specs_of())
            assert group.refit(tensors_of(1)).digest == in_place
            attending.result()


def test_the_asynchronous_client_does_the_same(daemon: Daemon, daemon_process: DaemonProcess, in_place: str) -> None:
    """The event loop stays free: requests are served while the group forms and while it broadcasts."""
    daemon.release_writer()

    async def refit() -> str | None:
        async with AsyncDaemon.connect(daemon_process.endpoint) as client, await client.collective() as group:
            asking = asyncio.create_task(client.status())
            report = await group.refit(tensors_of(1))
            await asking
            return report.digest

    assert asyncio.run(refit()) == in_place


# --- refused, or failed -----------------------------------------------------------------------------------------------


def without_a_norm() -> dict[str, torch.Tensor]:
    tensors = tensors_of(1)
    del tensors["model.layers.1.input_layernorm.weight"]
    return tensors


@pytest.mark.parametrize(
    "tensors",
    [
        without_a_norm(),
        {**tensors_of(1), "model.layers.9.mlp.up_proj.weight": torch.zeros(4, 4)},
        {**tensors_of(1), "model.norm.weight": torch.ones(64, dtype=torch.bfloat16)},
        tensors_of(1, torch.int8),
        {},
    ],
    ids=["missing", "unexpected", "misshapen", "integers", "nothing"],
)
def test_what_the_daemon_refuses_is_never_broadcast(daemon: Daemon, tensors: dict[str, torch.Tensor]) -> None:
    """Validated before anything is posted: the engine is unharmed, and the group is as good as before (trl#6913)."""
    with daemon.collective() as group:
        group.refit(tensors_of(0))
        with unharmed(daemon), pytest.raises(RefitdError) as refused:
            group.refit(tensors)
        assert refused.value.code is ErrorCode.MANIFEST_MISMATCH
        group.refit(tensors_of(1))
    assert daemon.verify(tensors_of(1), full=True)


def test_an_iterator_without_specs_is_refused_before_anything_is_sent(daemon: Daemon) -> None:
    with daemon.collective() as group:
        group.refit(tensors_of(0))
        with unharmed(daemon), pytest.raises(LayoutMismatch, match="specs="):
            group.refit(iter(tensors_of(1).items()))
        with unharmed(daemon), pytest.raises(LayoutMismatch, match="is expected"):
            group.refit(iter(tensors_of(1).items()), list(reversed(specs_of())))
        group.refit(tensors_of(1))


def test_a_trainer_that_fails_in_the_middle_leaves_what_was_kept(daemon: Daemon) -> None:
    """Its own error comes through; with keep_last = host the last committed weights are served; a new group works."""
    with daemon.collective(bucket_bytes=64 << 10) as group:
        group.refit(tensors_of(0))
        with unharmed(daemon), pytest.raises(RuntimeError, match="own bug"):
            group.refit(failing_after(1, AFTER_THREE_BUCKETS), specs_of())
        with pytest.raises(ClientClosed):
            group.refit(tensors_of(1))
    with daemon.collective() as group:
        group.refit(tensors_of(1))
    assert daemon.verify(tensors_of(1), full=True)


def test_a_group_that_was_closed_says_so(daemon: Daemon) -> None:
    with daemon.collective() as group:
        group.refit(tensors_of(0))
    with unharmed(daemon), pytest.raises(ClientClosed):
        group.refit(tensors_of(1))


def test_another_writer_takes_the_group_away(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """What the former writer still sends is refused; its group is gone with its role."""
    with daemon_process.connect() as former:
        group = former.collective()
        group.refit(tensors_of(0))
        daemon.acquire_writer(takeover=True)
        with unharmed(daemon):
            for _ in range(2):
                with pytest.raises(RefitdError) as refused:
                    group.refit(tensors_of(1))
                assert refused.value.code in (ErrorCode.STALE_EPOCH, ErrorCode.WRITER_BUSY)
        group.close()
    with daemon.collective() as mine:
        mine.refit(tensors_of(1))


def test_buckets_and_broadcasts_do_not_mix(daemon: Daemon, model: PreTrainedModel) -> None:
    """One session refits in place, through buckets and by broadcast, in turn."""
    with daemon.collective() as group:
        digests = {group.refit(tensors_of(0)).digest, daemon.refit(model).digest, daemon.refit(tensors_of(0)).digest}
        assert len(digests) == 1
