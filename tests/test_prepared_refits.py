"""A prepared refit has done everything but the copy; until its second word the old weights are the ones published."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AbortRefit,
    AcquireWriter,
    ApplyBucket,
    CloseSource,
    CommitRefit,
    FinishRefit,
    InflightPolicy,
    OpenSource,
    PrepareRefit,
    RefitAborted,
    RefitCommitted,
    RefitHeld,
    RefitPrepared,
    Request,
    SourceOpened,
    ValidateRefit,
    WriterAcquired,
)
from refit_protocol.states import EngineState
from refit_trainer import AsyncDaemon, Daemon, NotShareable, RefitdError, Sample, share_parameters
from refit_trainer.prepared import PreparedRefit
from tests.canary import sing, unharmed
from tests.conftest import GREEDY, PROMPT, load_seed
from tests.daemon_process import DaemonProcess
from tests.gpu.peers import peer
from tests.lending import exported, lent
from tests.markov import make_markov
from tests.test_in_flight import LONG, Running
from tests.waiting import until
from tests.wire import RawClient, raw_client
from tests.worker.models import random_model

# Blocks are left without a refit on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:a prepared refit was left")

NAMES = ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"]
# Less than any look at the daemon takes from here.
AT_ONCE = 0.001


def open_source(client: RawClient, model: PreTrainedModel) -> tuple[int, int]:
    epoch = client.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
    return epoch, client.ask(lent(model, epoch), SourceOpened).source


@pytest.fixture
def opened(daemon: Daemon, writer: RawClient, model: PreTrainedModel) -> tuple[int, int]:
    """(epoch, in-place source) of weights B in the shared model; the daemon serves weights A."""
    daemon.refit(model)
    load_seed(model, 1)
    return open_source(writer, model)


@pytest.fixture
def served(daemon: Daemon, model: PreTrainedModel) -> Daemon:
    """Serves weights A, and is the writer."""
    daemon.acquire_writer(takeover=True)
    daemon.refit(model)
    return daemon


def prepare(client: RawClient, opened: tuple[int, int], **options: object) -> int:
    command = PrepareRefit(epoch=opened[0], source=opened[1], **options)  # type: ignore[arg-type]
    return client.ask(command, RefitPrepared).refit


def until_ready(daemon: Daemon) -> None:
    until(lambda: daemon.status().state is EngineState.READY, "the gate open again")


def halve(model: PreTrainedModel, names: list[str]) -> None:
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).mul_(0.5)


# --- published --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attest", ["off", "sampled", "full"])
def test_what_the_parameters_hold_at_the_refit_is_served(served: Daemon, model: PreTrainedModel, attest: str) -> None:
    """Not what they held when it was prepared. The time in between is the trainer's, not the refit's."""
    version, began = served.status().version, time.monotonic()
    with served.prepare_refit(model, attest=attest) as prepared:  # type: ignore[arg-type]
        load_seed(model, 1)
        prepared.refit()
    took_milliseconds = (time.monotonic() - began) * 1e3
    report = prepared.report()
    assert report.version == prepared.version == served.status().version == version + 1
    assert report.milliseconds.waited > 0
    assert report.milliseconds.total + report.milliseconds.waited <= took_milliseconds
    assert served.verify(model, full=True)
    assert sing(served)[1] == report.version


def test_an_ordinary_call_ends_it(served: Daemon, model: PreTrainedModel) -> None:
    """The loop that refits need not know that its refit was prepared."""
    version = served.status().version
    served.prepare_refit(model, policy="keep")
    load_seed(model, 1)
    report = served.refit(model)
    assert report.milliseconds.waited > 0
    assert (report.version, report.policy) == (version + 1, "keep")
    assert served.verify(model, full=True)


def test_a_version_of_ones_own_is_published(served: Daemon, model: PreTrainedModel) -> None:
    version = served.status().version + 10
    with served.prepare_refit(model, version=version) as prepared:
        prepared.refit()
    assert prepared.version == prepared.report().version == served.status().version == version


def test_until_then_the_old_version_is_published_and_requests_wait(
    served: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel
) -> None:
    """A request that comes meanwhile is answered by the new weights."""
    before = served.status().version
    samples: list[Sample] = []

    def ask() -> None:
        with daemon_process.connect() as other:
            samples.append(other.generate_one(PROMPT, GREEDY))

    asking = threading.Thread(target=ask)
    with served.prepare_refit(model) as prepared:
        status = served.status()
        assert (status.state, status.version) == (EngineState.REFITTING, before)
        asking.start()
        until(lambda: served.status().waiting_requests == 1, "the request at the gate")
        load_seed(model, 1)
        prepared.refit()
    asking.join(60)
    assert samples[0].version == before + 1


def test_a_part_is_prepared_like_the_whole(served: Daemon, model: PreTrainedModel) -> None:
    with served.prepare_refit(model, only=NAMES) as prepared:
        halve(model, NAMES)
        prepared.refit()
    assert prepared.report().partial
    assert served.verify(model, full=True)


def test_an_ordinary_refit_comes_behind_a_prepared_one(served: Daemon, model: PreTrainedModel) -> None:
    """And the other way round: neither leaves anything behind."""
    for seed in (1, 2):
        with served.prepare_refit(model) as prepared:
            load_seed(model, seed)
            prepared.refit()
        assert served.verify(model, full=True)
        load_seed(model, seed + 1)
        assert served.refit(model).milliseconds.waited == 0
        assert served.verify(model, full=True)


# --- requests in flight -----------------------------------------------------------------------------------------------


@pytest.fixture
def running(served: Daemon, model: PreTrainedModel) -> Iterator[Running]:
    yield Running(served, model)
    served.acquire_writer(takeover=True)
    load_seed(model, 0)
    served.refit(model)


def prepared_refit(daemon: Daemon, model: PreTrainedModel, running: Running, policy: InflightPolicy) -> None:
    with daemon.prepare_refit(model, policy=policy) as prepared:
        running.successors[prepared.version] = make_markov(model, 1)
        prepared.refit()


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_streams_go_on_under_the_new_weights(
    served: Daemon, model: PreTrainedModel, running: Running, policy: InflightPolicy
) -> None:
    """They stand while it is prepared; their tokens say where the border is, and none is lost."""
    first = max(running.successors)
    prepared_refit(served, model, running, policy)
    assert running.rest() == [first, first + 1]
    assert running.tokens == LONG.max_tokens


def test_streams_are_waited_for_before_it_is_prepared(served: Daemon, model: PreTrainedModel, running: Running) -> None:
    """Policy `finish`: all of their tokens are of the weights that they began with."""
    first = max(running.successors)
    prepared_refit(served, model, running, "finish")
    assert running.rest() == [first]
    assert running.tokens == LONG.max_tokens


def test_streams_are_cut_off_when_it_is_prepared(served: Daemon, model: PreTrainedModel, running: Running) -> None:
    """Policy `abort`: they end with what they have, and say why."""
    with served.prepare_refit(model, policy="abort"):
        assert running.rest() == [max(running.successors)]
    assert (running.deltas[-1].finish_reason, running.deltas[-1].error) == ("cancelled", ErrorCode.ABORTED)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_streams_go_on_under_the_old_weights_where_it_was_aborted(
    served: Daemon, model: PreTrainedModel, running: Running, policy: InflightPolicy
) -> None:
    first = max(running.successors)
    with served.prepare_refit(model, policy=policy):
        make_markov(model, 1)
    assert running.rest() == [first]
    assert running.tokens == LONG.max_tokens


# --- not published ----------------------------------------------------------------------------------------------------


class OwnBugError(Exception):
    pass


def abort(prepared: PreparedRefit) -> None:
    prepared.abort()
    prepared.abort()


def leave(_prepared: PreparedRefit) -> None:
    pass


def fail(_prepared: PreparedRefit) -> None:
    raise OwnBugError


@pytest.mark.parametrize("end", [abort, leave, fail])
def test_what_is_aborted_changes_nothing(
    served: Daemon, model: PreTrainedModel, end: Callable[[PreparedRefit], None]
) -> None:
    """By a word, by leaving the block, by an exception in it; the next one is prepared as ever."""
    with unharmed(served):
        try:
            with served.prepare_refit(model) as prepared:
                load_seed(model, 1)
                end(prepared)
        except OwnBugError:
            assert end is fail
        assert served.status().state is EngineState.READY
        with pytest.raises(RefitdError, match="has ended"):
            prepared.refit()
    with served.prepare_refit(model) as prepared:
        prepared.refit()
    assert served.verify(model, full=True)


@pytest.mark.parametrize(
    "patience", [{"hold_seconds": AT_ONCE}, {"deadline_seconds": 0.5}, {"deadline_seconds": 0.5, "hold_seconds": 60.0}]
)
def test_what_nobody_ends_ends_by_itself(
    daemon: Daemon, writer: RawClient, opened: tuple[int, int], patience: dict[str, float]
) -> None:
    """And what comes later finds nothing."""
    with unharmed(daemon):
        refit = prepare(writer, opened, **patience)
        until_ready(daemon)
        for late in (FinishRefit(epoch=opened[0], refit=refit), AbortRefit(epoch=opened[0], refit=refit)):
            assert writer.refused(late).code is ErrorCode.UNKNOWN_REFIT
        error = daemon.status().last_error
        assert error is not None
        assert error.code is ErrorCode.REFIT_FAILED


@pytest.mark.parametrize("only", [None, NAMES])
def test_what_comes_too_late_is_an_ordinary_refit(
    served: Daemon, model: PreTrainedModel, only: list[str] | None
) -> None:
    """With the same options, by itself."""
    with served.prepare_refit(model, only=only, hold_seconds=AT_ONCE, policy="recompute") as prepared:
        until_ready(served)
        halve(model, NAMES)
        prepared.refit()
    report = prepared.report()
    assert (report.partial, report.policy, report.milliseconds.waited) == (only is not None, "recompute", 0)
    assert served.verify(model, full=True)


def test_the_end_of_the_session_ends_it(
    daemon: Daemon, daemon_process: DaemonProcess, opened: tuple[int, int], model: PreTrainedModel
) -> None:
    assert opened, "weights B are in the shared model"
    with unharmed(daemon):
        with raw_client(daemon_process.endpoint) as other:
            other.hello(pid=os.getpid())
            prepare(other, open_source(other, model))
        until_ready(daemon)


def test_another_writer_ends_it(daemon: Daemon, writer: RawClient, opened: tuple[int, int]) -> None:
    """When the takeover is answered the gate is open, and the old writer is told that it is none."""
    with unharmed(daemon):
        refit = prepare(writer, opened)
        daemon.acquire_writer(takeover=True)
        assert daemon.status().state is EngineState.READY
        assert writer.refused(FinishRefit(epoch=opened[0], refit=refit)).code is ErrorCode.STALE_EPOCH


def test_another_writer_is_not_overruled_by_the_refit_that_comes_too_late(
    served: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel
) -> None:
    """It is no ordinary refit then."""
    with unharmed(served), daemon_process.connect() as other, served.prepare_refit(model) as prepared:
        other.acquire_writer(takeover=True)
        load_seed(model, 1)
        with pytest.raises(RefitdError) as refused:
            prepared.refit()
        assert refused.value.code is ErrorCode.STALE_EPOCH


def preparing_trainer(connection: Connection, endpoint: str) -> None:
    """Prepares a refit that it will not live to see."""
    with Daemon.connect(endpoint, client="preparing") as daemon:
        daemon.acquire_writer(takeover=True)
        model = share_parameters(random_model("qwen3", seed=1))
        with daemon.prepare_refit(model, hold_seconds=60.0):
            connection.send("prepared")
            connection.recv()


def test_a_killed_trainer_has_changed_nothing(
    served: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel
) -> None:
    """Long before `hold_seconds` are over the old weights are served again, and the next trainer refits."""
    with unharmed(served), peer(preparing_trainer, daemon_process.endpoint) as trainer:
        assert trainer.answer() == "prepared"
        assert served.status().state is EngineState.REFITTING
        trainer.kill()
        until_ready(served)
    served.acquire_writer()
    load_seed(model, 1)
    served.refit(model)
    assert served.verify(model, full=True)


def test_parameters_that_were_moved_meanwhile_are_not_read(served: Daemon, model: PreTrainedModel) -> None:
    """Whatever now lies where they were would be served."""
    with unharmed(served), served.prepare_refit(model) as prepared:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
        with pytest.raises(NotShareable, match=r"moved after prepare_refit"):
            prepared.refit()
    share_parameters(model)
    served.refit(model)
    assert served.verify(model, full=True)


def test_values_are_looked_at_when_they_are_final(served: Daemon, model: PreTrainedModel) -> None:
    """NaN that comes meanwhile is found before anything is written; NaN that goes meanwhile harms nobody."""
    weight = model.lm_head.weight
    with unharmed(served), served.prepare_refit(model, check_finite=True) as prepared:
        with torch.no_grad():
            weight[3, 5] = float("nan")
        with pytest.raises(RefitdError) as refused:
            prepared.refit()
        assert refused.value.code is ErrorCode.NOT_FINITE
    with served.prepare_refit(model, check_finite=True) as prepared:
        with torch.no_grad():
            weight[3, 5] = 1.0
        prepared.refit()
    assert served.verify(model, full=True)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"epoch": 1}, ErrorCode.STALE_EPOCH),
        ({"source": 10**6}, ErrorCode.UNKNOWN_SOURCE),
        ({"version": 0}, ErrorCode.VERSION_NOT_INCREASING),
        ({"version": 1 << 63}, ErrorCode.LIMIT_EXCEEDED),
        ({"only": ["no.such.tensor"]}, ErrorCode.MANIFEST_MISMATCH),
        ({"deadline_seconds": 0.0}, ErrorCode.DEADLINE_EXCEEDED),
    ],
)
def test_what_a_commit_refuses_is_refused(
    daemon: Daemon, writer: RawClient, opened: tuple[int, int], change: dict[str, object], code: ErrorCode
) -> None:
    """The same arguments, the same code; nothing has happened."""
    arguments = {"epoch": opened[0], "source": opened[1], **change}
    with unharmed(daemon):
        assert writer.refused(PrepareRefit(**arguments)).code is code  # type: ignore[arg-type]
        assert daemon.status().state is EngineState.READY
        assert writer.refused(CommitRefit(**arguments)).code is code  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_hold_of_no_time_is_refused(
    daemon: Daemon, writer: RawClient, opened: tuple[int, int], seconds: float
) -> None:
    with unharmed(daemon):
        refused = writer.refused(PrepareRefit(epoch=opened[0], source=opened[1], hold_seconds=seconds))
        assert refused.code is ErrorCode.DEADLINE_EXCEEDED
        assert daemon.status().state is EngineState.READY


def test_buckets_cannot_be_prepared(
    daemon: Daemon, writer: RawClient, model: PreTrainedModel, opened: tuple[int, int]
) -> None:
    """Nor can buckets be sent to what was prepared, which stays as it is."""
    command = OpenSource(epoch=opened[0], kind="bucket", segments=exported(model).memory.segments)
    buckets = writer.ask(command, SourceOpened).source
    with unharmed(daemon):
        assert writer.refused(PrepareRefit(epoch=opened[0], source=buckets)).code is ErrorCode.UNKNOWN_SOURCE
    refit = prepare(writer, opened)
    bucket = ApplyBucket(epoch=opened[0], refit=refit, bucket=0, pieces=[])
    assert writer.refused(bucket).code is ErrorCode.UNKNOWN_SOURCE
    writer.ask(FinishRefit(epoch=opened[0], refit=refit), RefitCommitted)
    assert daemon.verify(model, full=True)


def test_nothing_else_begins_meanwhile(
    daemon: Daemon, writer: RawClient, model: PreTrainedModel, opened: tuple[int, int]
) -> None:
    """Neither a refit, nor what would change sources, nor sleep; it is finished as if nobody had tried."""
    epoch, source = opened
    refit = prepare(writer, opened)
    others: list[Request] = [
        PrepareRefit(epoch=epoch, source=source),
        CommitRefit(epoch=epoch, source=source),
        ValidateRefit(epoch=epoch, source=source),
        CloseSource(epoch=epoch, source=source),
        lent(model, epoch),
    ]
    for other in others:
        assert writer.refused(other).code is ErrorCode.REFIT_IN_PROGRESS
    with pytest.raises(RefitdError) as refused:
        daemon.sleep()
    assert refused.value.code is ErrorCode.NOT_ALLOWED_NOW
    writer.ask(FinishRefit(epoch=epoch, refit=refit), RefitCommitted)
    assert daemon.verify(model, full=True)


def test_another_refit_of_the_same_client_is_refused_meanwhile(served: Daemon, model: PreTrainedModel) -> None:
    """It does not wait for what only its own caller can end."""
    with served.prepare_refit(model) as prepared:
        others = (
            lambda: served.refit(model, policy="abort"),
            lambda: served.refit(dict(model.named_parameters())),
            lambda: served.prepare_refit(model),
        )
        for other in others:
            with pytest.raises(RefitdError) as refused:
                other()
            assert refused.value.code is ErrorCode.REFIT_IN_PROGRESS
        load_seed(model, 1)
        prepared.refit()
    assert served.verify(model, full=True)


def test_it_ends_once(served: Daemon, daemon: Daemon, writer: RawClient, opened: tuple[int, int]) -> None:
    """On the wire, and for the trainer; a block that is left behind the refit aborts nothing."""
    epoch = opened[0]
    refit = prepare(writer, opened)
    writer.ask(FinishRefit(epoch=epoch, refit=refit), RefitCommitted)
    with unharmed(daemon):
        for late in (FinishRefit(epoch=epoch, refit=refit), AbortRefit(epoch=epoch, refit=refit)):
            assert writer.refused(late).code is ErrorCode.UNKNOWN_REFIT


def test_a_prepared_refit_of_the_client_is_used_once(served: Daemon, model: PreTrainedModel) -> None:
    with served.prepare_refit(model) as prepared:
        with pytest.raises(RefitdError, match="comes first"):
            prepared.report()
        prepared.refit()
        with pytest.raises(RefitdError, match="has ended"):
            prepared.refit()
        prepared.abort()
    assert served.status().version == prepared.report().version == prepared.version


@pytest.mark.parametrize("sharded", [True, False])
def test_only_what_one_process_shares_is_prepared(
    served: Daemon, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    """A module that lies in private memory, or in that of several ranks, is refused before anything is sent."""
    module = random_model("qwen3", seed=1)
    if sharded:
        monkeypatch.setattr(exported(share_parameters(module)), "sharded", True)
    with unharmed(served), pytest.raises(NotShareable, match="use refit"):
        served.prepare_refit(module)


# --- held -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("publish", [True, False])
def test_what_was_prepared_is_held_and_then_ended(
    daemon: Daemon, writer: RawClient, model: PreTrainedModel, opened: tuple[int, int], publish: bool
) -> None:
    """With `hold` the first `FinishRefit` writes, and the second publishes; an abort brings the kept weights back."""
    epoch = opened[0]
    before = sing(daemon)
    refit = prepare(writer, opened)
    held = writer.ask(FinishRefit(epoch=epoch, refit=refit, hold=True), RefitHeld)
    assert (held.refit, held.version) == (refit, before[1] + 1)
    assert daemon.status().version == before[1]
    if publish:
        report = writer.ask(FinishRefit(epoch=epoch, refit=refit), RefitCommitted).report
        assert (report.version, report.digest) == (held.version, held.digest)
        assert report.milliseconds.waited > 0
        assert daemon.verify(model, full=True)
    else:
        writer.ask(AbortRefit(epoch=epoch, refit=refit), RefitAborted)
        assert sing(daemon) == before


# --- for asyncio ------------------------------------------------------------------------------------------------------


def test_async_clients_prepare_refits(served: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel) -> None:
    """Refitted, left, and cancelled in the middle of the block."""

    async def run() -> None:
        async with await AsyncDaemon.connect(daemon_process.endpoint) as daemon:
            async with await daemon.prepare_refit(model) as prepared:
                load_seed(model, 1)
                with pytest.raises(RefitdError, match="comes first"):
                    prepared.report()
                await prepared.refit()
            report = prepared.report()
            assert report.version == prepared.version
            assert await daemon.verify(model, full=True)
            async with await daemon.prepare_refit(model):
                assert (await daemon.status()).state is EngineState.REFITTING
            assert (await daemon.status()).state is EngineState.READY

            inside = asyncio.Event()

            async def never_refit() -> None:
                async with await daemon.prepare_refit(model, hold_seconds=60.0):
                    inside.set()
                    await asyncio.Event().wait()

            preparing = asyncio.create_task(never_refit())
            await inside.wait()
            preparing.cancel()
            await asyncio.wait({preparing})
            assert preparing.cancelled()
            status = await daemon.status()
            assert (status.state, status.version) == (EngineState.READY, report.version)

    served.release_writer()
    asyncio.run(run())


def test_what_waits_to_be_prepared_can_be_cancelled(
    served: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel, running: Running
) -> None:
    """The stream that it waited for goes on, requests come in again, and the next one is prepared."""

    async def run() -> None:
        async with await AsyncDaemon.connect(daemon_process.endpoint) as daemon:
            await daemon.acquire_writer(takeover=True)
            preparing = asyncio.create_task(daemon.prepare_refit(model, policy="finish"))
            while (await daemon.status()).state is not EngineState.REFITTING:
                assert not preparing.done(), "the stream was too short"
            preparing.cancel()
            await asyncio.wait({preparing})
            assert preparing.cancelled()
            assert (await daemon.status()).state is EngineState.READY
            async with await daemon.prepare_refit(model, policy="keep") as prepared:
                await prepared.refit()
            await daemon.release_writer()

    first = max(running.successors)
    running.successors[first + 1] = running.successors[first]
    asyncio.run(run())
    running.rest()
    assert running.tokens == LONG.max_tokens
