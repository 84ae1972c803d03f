"""Cases A, B and D: refits that fail half-way. Torn is said so, never served, and can be mended."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    AbortRefit,
    AcquireWriter,
    ApplyBucket,
    BeginRefit,
    BucketApplied,
    FinishRefit,
    OpenSource,
    RefitAborted,
    RefitBegan,
    ReleaseWriter,
    SourceOpened,
    WriterAcquired,
    WriterReleased,
)
from refit_protocol.states import EngineState
from refit_trainer import Daemon, DaemonRestarted, DaemonUnreachable, RefitdError, Sampling
from refit_trainer.sharing import shared_module
from tests.canary import sing, unharmed
from tests.conftest import GREEDY, PROMPT
from tests.daemon_process import DaemonProcess, running_daemon, standing_still
from tests.parallel.engines import wait_until_refitting
from tests.server.raw_client import RawClient, raw_client
from tests.trainers import SMALL_BUCKET_BYTES, specs_of, start_suicidal_trainer, tensors_of

AFTER_THREE_BUCKETS = 12


@pytest.fixture(scope="module")
def unprotected(model_path: Path, short_directory: Path) -> Iterator[DaemonProcess]:
    """A daemon of this module's own that keeps no weights."""
    with running_daemon(model_path, short_directory / "unprotected", "refit.keep_last=none") as process:
        yield process


def failing_after(seed: int, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    for index, named in enumerate(tensors_of(seed)):
        if index == count:
            raise RuntimeError("the trainer's own bug")
        yield named


def wait_for(daemon: Daemon, *states: EngineState) -> EngineState:
    """The first of these states that is seen; every look is a round trip, the test's own timeout bounds it."""
    while (state := daemon.status().state) not in states:
        assert state in (EngineState.REFITTING, EngineState.TORN, EngineState.RESTORING)
    return state


def test_a_trainer_killed_mid_update_leaves_torn_weights_that_are_never_served(
    unprotected: DaemonProcess, model: PreTrainedModel
) -> None:
    """Torn, said so, version unmoved, generation refused; the next client's full refit mends it without a restart, and
    a loop that begins by waiting for the engine comes to it."""
    with unprotected.connect() as daemon:
        daemon.refit(model)
        daemon.release_writer()
        before = sing(daemon)
        trainer = start_suicidal_trainer(unprotected.endpoint, seed=1, count=AFTER_THREE_BUCKETS)
        assert trainer.wait(120) == -9
        assert wait_for(daemon, EngineState.TORN, EngineState.READY) is EngineState.TORN
        status = daemon.wait_until_ready()
        assert status.state is EngineState.TORN
        assert status.version == before[1]
        assert status.digest is None
        assert status.last_error is not None
        with pytest.raises(RefitdError) as refused:
            daemon.generate_one(PROMPT, GREEDY)
        assert refused.value.code is ErrorCode.TORN
        with pytest.raises(RefitdError) as partial:
            daemon.refit(model, only=["model.norm.weight"])
        assert partial.value.code is ErrorCode.TORN
        with pytest.raises(RefitdError) as nothing:
            daemon.restore()
        assert nothing.value.code is ErrorCode.NOTHING_TO_RESTORE
        daemon.refit(model)
        assert (sing(daemon)[0], daemon.status().digest) == (before[0], before[2])


def test_a_prepared_refit_mends_torn_weights(unprotected: DaemonProcess, model: PreTrainedModel) -> None:
    """All of them: a part is refused when it is prepared. Aborted, it leaves them as torn as they were."""
    with unprotected.connect(bucket_bytes=SMALL_BUCKET_BYTES) as daemon:
        with pytest.raises(RuntimeError, match="own bug"):
            daemon.refit(failing_after(1, AFTER_THREE_BUCKETS), specs=specs_of())
        assert daemon.status().state is EngineState.TORN
        with pytest.raises(RefitdError) as partial:
            daemon.prepare_refit(model, only=["model.norm.weight"])
        assert partial.value.code is ErrorCode.TORN
        with daemon.prepare_refit(model):
            assert (daemon.status().state, daemon.status().open_refit) == (EngineState.REFITTING, "prepared")
        assert daemon.status().state is EngineState.TORN
        with daemon.prepare_refit(model) as prepared:
            prepared.refit()
        assert sing(daemon)[1] == prepared.version
        assert daemon.verify(model, full=True)


def test_a_trainer_killed_mid_update_is_mended_from_what_was_kept(
    daemon: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel
) -> None:
    """With keep_last = host the last committed weights are back by themselves, bit for bit, and are served."""
    daemon.refit(model)
    daemon.release_writer()
    with unharmed(daemon):
        trainer = start_suicidal_trainer(daemon_process.endpoint, seed=1, count=AFTER_THREE_BUCKETS)
        assert trainer.wait(120) == -9
        wait_for(daemon, EngineState.READY)
        assert daemon.status().last_error is not None
    assert daemon.verify(model, full=True)


def test_a_trainer_that_fails_mid_update_aborts_it(
    daemon: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel
) -> None:
    """The trainer sees its own error; the engine is as it was, and the next refit works."""
    daemon.refit(model)
    with daemon_process.connect(bucket_bytes=SMALL_BUCKET_BYTES) as trainer:
        daemon.release_writer()
        with unharmed(daemon), pytest.raises(RuntimeError, match="own bug"):
            trainer.refit(failing_after(1, AFTER_THREE_BUCKETS), specs=specs_of())
        trainer.release_writer()
    assert daemon.refit(model).version > 0


def test_streams_that_ran_into_a_torn_refit_end_with_an_error(
    unprotected: DaemonProcess, model: PreTrainedModel
) -> None:
    """Frozen requests must not go on with torn weights: each ends, saying why."""
    with unprotected.connect() as daemon, unprotected.connect(bucket_bytes=SMALL_BUCKET_BYTES) as trainer:
        daemon.release_writer()
        # With its buckets open, the next refit needs nothing of the engine before it shuts the gate.
        trainer.refit(tensors_of(0), specs=specs_of())
        stream = daemon.stream([PROMPT], Sampling(max_tokens=240, ignore_eos=True), incomplete="yield")
        received = [next(stream)]
        with ThreadPoolExecutor(1) as pool, standing_still(*unprotected.engine_pids()):
            refit = pool.submit(trainer.refit, failing_after(1, AFTER_THREE_BUCKETS), specs=specs_of())
            wait_until_refitting(daemon, refit)
        received += list(stream)
        with pytest.raises(RuntimeError, match="own bug"):
            refit.result()
        assert received[-1].finish_reason == "cancelled"
        assert received[-1].error is ErrorCode.TORN
        trainer.release_writer()
        daemon.refit(model)


def test_requests_at_the_gate_of_a_failing_refit_are_answered(
    unprotected: DaemonProcess, model: PreTrainedModel
) -> None:
    """Requests that wait while an update fails get its typed error, none waits for ever."""
    with unprotected.connect() as daemon:
        daemon.refit(model)
        daemon.release_writer()
        assert outcome_at_the_gate(unprotected) is ErrorCode.TORN
        daemon.refit(model)


def test_requests_at_the_gate_wait_for_the_weights_to_be_put_back(
    daemon: Daemon, daemon_process: DaemonProcess, model: PreTrainedModel
) -> None:
    """Where the last weights were kept the failed update is not theirs to see: they are served by those weights."""
    version = daemon.refit(model).version
    expected = daemon.generate_one(PROMPT, GREEDY).token_ids.tolist()
    daemon.release_writer()
    assert outcome_at_the_gate(daemon_process) == (version, expected)


def outcome_at_the_gate(process: DaemonProcess) -> object:
    """What a request gets that came in the middle of an update which then fails: version and ids, or the error."""
    outcome: list[object] = []
    with process.connect() as other, process.connect(bucket_bytes=SMALL_BUCKET_BYTES) as trainer:

        def ask() -> None:
            try:
                sample = other.generate_one(PROMPT, GREEDY)
                outcome.append((sample.version, sample.token_ids.tolist()))
            except RefitdError as error:
                outcome.append(error.code)

        asking = threading.Thread(target=ask)

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for index, named in enumerate(tensors_of(1)):
                if index == AFTER_THREE_BUCKETS:
                    asking.start()
                    while daemon_waits(other) == 0:
                        assert asking.is_alive()
                    raise RuntimeError("the trainer's own bug")
                yield named

        with pytest.raises(RuntimeError, match="own bug"):
            trainer.refit(tensors(), specs=specs_of())
        asking.join(60)
        trainer.release_writer()
    [only] = outcome
    return only


def test_a_bucket_without_pieces_writes_nothing(unprotected: DaemonProcess, model: PreTrainedModel) -> None:
    """Aborted after it, the update has changed nothing, and the weights are served on."""
    with unprotected.connect() as daemon:
        daemon.refit(model)
        daemon.release_writer()
        with unharmed(daemon), open_refit(unprotected.endpoint, model) as (writer, epoch, refit):
            assert daemon.status().open_refit == "receiving"
            apply = ApplyBucket(epoch=epoch, refit=refit, bucket=0, pieces=[])
            assert writer.ask(apply, BucketApplied).size_bytes == 0
            assert writer.ask(AbortRefit(epoch=epoch, refit=refit), RefitAborted).state is EngineState.READY


@contextmanager
def open_refit(endpoint: str, model: PreTrainedModel) -> Iterator[tuple[RawClient, int, int]]:
    """A writer, its epoch and a bucket refit for which everything is announced and nothing has come."""
    shared = shared_module(model)
    assert shared is not None
    with raw_client(endpoint) as writer:
        writer.hello(pid=os.getpid())
        epoch = writer.ask(AcquireWriter(), WriterAcquired).epoch
        opened = OpenSource(epoch=epoch, kind="bucket", segments=shared.memory.segments)
        source = writer.ask(opened, SourceOpened).source
        begin = BeginRefit(epoch=epoch, source=source, tensors=specs_of())
        yield writer, epoch, writer.ask(begin, RefitBegan).refit
        writer.ask(ReleaseWriter(), WriterReleased)


def daemon_waits(daemon: Daemon) -> int:
    return daemon.status().waiting_requests


def test_daemon_killed_mid_update_and_started_again(
    unprotected: DaemonProcess,
    model_path: Path,
    fresh_sample: tuple[list[int], list[float]],
    model: PreTrainedModel,
) -> None:
    """The same client sees another epoch, its update and the old epoch are refused, not one byte of it is served.

    What the killed one left in the temp directory is gone, and so is at the end what the second one had there.
    It comes last, since it kills the module's daemon.
    """
    left = unprotected.temporary_directory
    assert next(left.iterdir()), "an engine leaves no files any more"
    with unprotected.connect(bucket_bytes=SMALL_BUCKET_BYTES) as trainer:
        epoch = trainer.status().epoch
        with pytest.raises(DaemonUnreachable):
            trainer.refit(killing_after(unprotected, AFTER_THREE_BUCKETS), specs=specs_of())
        with running_daemon(model_path, unprotected.log.parent) as second:
            sees_another_daemon(trainer, epoch)
            refuses_the_old_epoch(second, epoch + 1)
            assert trainer.verify(model, full=True)
            sample = trainer.generate_one(PROMPT, GREEDY)
            assert (sample.token_ids.tolist(), sample.logprobs.tolist(), sample.version) == (*fresh_sample, 0)
            assert trainer.refit(tensors_of(1), specs=specs_of()).version == 1
            assert not left.exists()
            left = second.temporary_directory
            second.process.terminate()
            second.process.wait()
            assert not left.exists()


def killing_after(daemon: DaemonProcess, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The first `count` tensors of other weights; asking for one more kills the daemon."""
    for index, named in enumerate(tensors_of(1)):
        if index == count:
            daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait()
        yield named


def sees_another_daemon(trainer: Daemon, epoch: int) -> None:
    """Told once; the status, which is how a trainer looks around, is answered before that."""
    assert trainer.status().epoch > epoch
    with pytest.raises(DaemonRestarted, match="refit before generating"):
        trainer.generate_one(PROMPT, GREEDY)


def refuses_the_old_epoch(daemon: DaemonProcess, epoch: int) -> None:
    """What the killed daemon's writer would have sent next."""
    with raw_client(daemon.endpoint) as late:
        assert late.refusal(FinishRefit(epoch=epoch, refit=1)) is ErrorCode.NO_SESSION
        late.hello(pid=os.getpid())
        assert late.refusal(FinishRefit(epoch=epoch, refit=1)) is ErrorCode.STALE_EPOCH
