"""The trainer's side against a real daemon with a real engine."""

from __future__ import annotations

import _thread
import asyncio
import gc
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import zmq
from transformers import PreTrainedModel

from refit_protocol.codec import decode_reply, encode_request
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import (
    PROTOCOL_VERSION,
    Generate,
    GenerationFinished,
    GetStatus,
    Hello,
    RequestHeader,
    Status,
    Welcome,
)
from refit_protocol.states import EngineState
from refit_protocol.tensors import DType, TensorShape
from refit_trainer import AsyncDaemon, Daemon, LayoutMismatch, RefitdError, Sampling, share_parameters
from refit_trainer.names import checkpoint_tensors
from tests.conftest import GREEDY, PROMPT
from tests.daemon_process import DaemonProcess
from tests.worker.models import random_model

Tokens = tuple[list[int], list[float]]


def greedy(daemon: Daemon) -> Tokens:
    sample = daemon.generate_one(PROMPT, GREEDY)
    return sample.token_ids.tolist(), sample.logprobs.tolist()


@pytest.fixture
def expected(daemon: Daemon) -> Tokens:
    """What weights B generate when they come by the plain way, in place; the engine is back at weights A afterwards."""
    daemon.refit(share_parameters(random_model("qwen3", seed=1)))
    tokens = greedy(daemon)
    daemon.refit(share_parameters(random_model("qwen3", seed=0)))
    assert greedy(daemon) != tokens
    return tokens


@pytest.fixture
def other() -> PreTrainedModel:
    """Weights B, not shared."""
    return random_model("qwen3", seed=1)


# --- in place ---


def test_optimiser_step_in_place_reaches_the_engine(daemon: Daemon, model: PreTrainedModel) -> None:
    """One export, many refits: each serves exactly the weights of its moment."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    versions = []
    for _ in range(3):
        model(torch.tensor([PROMPT])).logits.float().logsumexp(-1).sum().backward()
        optimiser.step()
        optimiser.zero_grad()
        assert not daemon.verify(model)
        versions.append(daemon.refit(model).version)
        assert daemon.verify(model, full=True)
    assert versions == sorted(set(versions))


def test_two_shared_models_take_turns(daemon: Daemon, expected: Tokens, fresh_sample: Tokens) -> None:
    """Each model's memory is a source of its own."""
    models = [share_parameters(random_model("qwen3", seed=seed)) for seed in (0, 1)]
    for _ in range(2):
        for model, tokens in zip(models, (fresh_sample, expected), strict=True):
            daemon.refit(model)
            assert greedy(daemon) == tokens


def test_many_refits_leave_nothing_behind(daemon: Daemon, model: PreTrainedModel) -> None:
    """Descriptors and threads of the trainer are the same after the tenth refit as after the fiftieth."""

    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for _ in range(10):
        daemon.refit(model)
    before = held()
    for _ in range(40):
        daemon.refit(model)
    assert held() == before


# --- buckets ---


@pytest.mark.parametrize("bucket_bytes", [64, 1000, 32 << 10, 1 << 30])
def test_any_bucket_size_gives_the_same_weights(
    daemon_process: DaemonProcess, daemon: Daemon, expected: Tokens, other: PreTrainedModel, bucket_bytes: int
) -> None:
    """From less than a row to more than the model."""
    few = ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"]
    names = few if bucket_bytes < 1000 else None
    if names is not None:
        daemon.refit(other)
    daemon.release_writer()
    with daemon_process.connect(bucket_bytes=bucket_bytes) as writer:
        report = writer.refit(other, only=names)
        assert report.partial == (names is not None)
        assert writer.verify(other, full=True)
        assert greedy(writer) == expected


def test_iterator_in_any_order(daemon: Daemon, expected: Tokens, other: PreTrainedModel) -> None:
    """A generator that says nothing beforehand, backwards: announced from the engine's manifest, then from memory."""
    for _ in range(2):
        daemon.refit(share_parameters(random_model("qwen3", seed=0)))
        daemon.refit(pair for pair in reversed(checkpoint_tensors(other).items()))
        assert greedy(daemon) == expected


def test_iterator_of_another_dtype(daemon: Daemon, expected: Tokens, other: PreTrainedModel) -> None:
    """A float32 trainer of a bfloat16 engine: the first tensor says so."""
    daemon.refit((name, tensor.float()) for name, tensor in checkpoint_tensors(other).items())
    assert greedy(daemon) == expected


def test_iterator_with_specs(daemon: Daemon, expected: Tokens, other: PreTrainedModel) -> None:
    """Mixed dtypes that nobody could foresee are announced by the caller."""
    tensors = {
        name: tensor.float() if index % 2 else tensor
        for index, (name, tensor) in enumerate(checkpoint_tensors(other).items())
    }
    specs = [
        TensorShape(name=name, dtype=DType(str(tensor.dtype).removeprefix("torch.")), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    daemon.refit(iter(tensors.items()), specs)
    assert greedy(daemon) == expected


def test_iterator_is_consumed_on_the_callers_thread(daemon: Daemon, other: PreTrainedModel) -> None:
    """A generator may use what belongs to its thread: the current device, a process group, autograd's mode."""
    threads = set()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in checkpoint_tensors(other).items():
            threads.add(threading.get_ident())
            yield pair

    daemon.refit(tensors())
    assert threads == {threading.get_ident()}


def test_mistake_in_the_first_bucket_changes_nothing(daemon: Daemon, model: PreTrainedModel) -> None:
    """It is found before the gate closes: the version stays and generation goes on."""
    daemon.refit(model)
    version, tokens = daemon.status().version, greedy(daemon)
    with pytest.raises(LayoutMismatch, match=r"model\.norm\.weight"):
        daemon.refit(pair for pair in checkpoint_tensors(model).items() if pair[0] != "model.norm.weight")
    assert daemon.status().version == version
    assert greedy(daemon) == tokens


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_iterator_that_fails_half_way(
    daemon_process: DaemonProcess,
    daemon: Daemon,
    model: PreTrainedModel,
    other: PreTrainedModel,
    error: type[BaseException],
) -> None:
    """The caller gets its own error, the daemon an abort: never half of the weights, and the next refit succeeds."""
    daemon.refit(model)
    tokens = greedy(daemon)
    daemon.release_writer()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(checkpoint_tensors(other).items()):
            if index == 8:
                raise error("the trainer fails")
            yield pair

    with daemon_process.connect(bucket_bytes=64 << 10) as writer:
        with pytest.raises(error, match="the trainer fails"):
            writer.refit(tensors())
        if writer.status().state is EngineState.TORN:
            writer.restore()
        assert greedy(writer) == tokens
        writer.refit(other)
        assert writer.verify(other)


def test_wrong_shape_is_refused_by_name(daemon: Daemon, other: PreTrainedModel) -> None:
    """Before anything is written."""
    tensors = checkpoint_tensors(other)
    tensors["model.norm.weight"] = torch.ones(5, dtype=torch.bfloat16)
    with pytest.raises(RefitdError, match=r"model\.norm\.weight") as caught:
        daemon.refit(tensors)
    assert caught.value.code is ErrorCode.MANIFEST_MISMATCH
    assert daemon.status().state is EngineState.READY


# --- roles ---


def test_second_writer_is_refused_until_it_takes_over(
    daemon_process: DaemonProcess, daemon: Daemon, model: PreTrainedModel
) -> None:
    """And the first one is then fenced off, until it takes over in turn."""
    daemon.refit(model)
    with daemon_process.connect() as second:
        with pytest.raises(RefitdError) as caught:
            second.refit(model)
        assert caught.value.code is ErrorCode.WRITER_BUSY
        second.acquire_writer(takeover=True)
        second.refit(model)
        with pytest.raises(RefitdError) as caught:
            daemon.refit(model)
        assert caught.value.code is ErrorCode.STALE_EPOCH
        daemon.acquire_writer(takeover=True)
        daemon.refit(model)


# --- generation ---


def test_many_threads_generate_at_once(daemon: Daemon, model: PreTrainedModel) -> None:
    """One client, one socket, 32 streams: everybody gets their own tokens."""
    daemon.refit(model)
    alone = {index: daemon.generate_one([index + 2, 7, 9], GREEDY).token_ids.tolist() for index in range(4)}
    found: dict[int, list[int]] = {}

    def generate(index: int) -> None:
        found[index] = daemon.generate_one([index % 4 + 2, 7, 9], GREEDY).token_ids.tolist()

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: alone[index % 4] for index in range(32)}


def test_samples_of_a_group(daemon: Daemon) -> None:
    """Every output of every prompt comes once, as long as asked for."""
    samples = list(daemon.generate([PROMPT, PROMPT[:2]], Sampling(n=3, max_tokens=5, ignore_eos=True)))
    assert sorted((sample.prompt, sample.output) for sample in samples) == [(p, o) for p in range(2) for o in range(3)]
    assert all(len(sample.token_ids) == len(sample.logprobs) == 5 for sample in samples)


def test_deltas_join_to_the_sample(daemon: Daemon) -> None:
    """The stream and the sample are the same tokens."""
    deltas = list(daemon.stream([PROMPT], GREEDY))
    sample = daemon.generate_one(PROMPT, GREEDY)
    assert np.concatenate([delta.token_ids for delta in deltas]).tolist() == sample.token_ids.tolist()
    assert deltas[-1].finish_reason == sample.finish_reason == "length"


def test_cancelled_stream_ends_with_what_it_had(daemon: Daemon) -> None:
    """The iterator runs to its end; the engine is idle afterwards."""
    deltas = daemon.stream([PROMPT], Sampling(max_tokens=200, ignore_eos=True))
    tokens = len(next(deltas).token_ids)
    deltas.cancel()
    rest = list(deltas)
    assert rest[-1].finish_reason == "cancelled"
    assert tokens + sum(len(delta.token_ids) for delta in rest) < 200
    assert daemon.status().running_requests == 0


def read_for_ever(daemon: Daemon) -> None:
    while True:
        list(daemon.stream([PROMPT], Sampling(max_tokens=200, ignore_eos=True)))


def test_interrupt_while_waiting_leaves_the_client_usable(daemon: Daemon) -> None:
    """Ctrl-C in the middle of a generation reaches the caller, and nothing keeps running."""
    deltas = daemon.stream([PROMPT], Sampling(max_tokens=200, ignore_eos=True))
    next(deltas)
    threading.Timer(0.05, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        read_for_ever(daemon)
    deltas.close()
    assert isinstance(daemon.status(), Status)


@pytest.mark.parametrize("shared", [True, False])
def test_cancelled_refit_opens_the_gate_again(
    daemon: Daemon, daemon_process: DaemonProcess, other: PreTrainedModel, *, shared: bool
) -> None:
    """One that still waits for running requests is withdrawn at once: they go on, and so does everybody else."""
    version = daemon.status().version
    weights = share_parameters(other) if shared else other

    async def cancelled() -> None:
        async with AsyncDaemon.connect(daemon_process.endpoint) as trainer:
            async with trainer.stream([PROMPT], Sampling(max_tokens=240, ignore_eos=True)) as deltas:
                await anext(deltas)
                refit = asyncio.create_task(trainer.refit(weights, policy="finish"))
                while (await trainer.status()).state is not EngineState.REFITTING:
                    assert not refit.done(), "the request has ended too soon"
                refit.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await refit
                status = await trainer.status()
                assert (status.state, status.version, status.writer) == (EngineState.READY, version, None)
            assert (await trainer.refit(weights)).version == version + 1

    daemon.release_writer()
    asyncio.run(cancelled())


# --- without this library ---


def test_what_is_cancelled_before_its_first_token_was_asked_for_has_an_end_too(daemon_process: DaemonProcess) -> None:
    """One for every output, as if it had been cancelled a moment later."""

    async def scenario() -> list[str | None]:
        async with AsyncDaemon.connect(daemon_process.endpoint) as trainer:
            samples = trainer.generate([PROMPT, PROMPT], Sampling(max_tokens=200, ignore_eos=True))
            await samples.cancel()
            return [sample.finish_reason async for sample in samples]

    assert asyncio.run(scenario()) == ["cancelled", "cancelled"]


def test_plain_req_socket_is_enough(daemon_process: DaemonProcess) -> None:
    """Hello, status and a unary generation in ten lines of plain ZeroMQ."""
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.REQ_RELAXED, 1)
    socket.setsockopt(zmq.REQ_CORRELATE, 1)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(daemon_process.endpoint)

    def ask(number: int, body: object, session: str | None = None, *blobs: bytes) -> tuple[object, list[bytes]]:
        socket.send_multipart(encode_request(RequestHeader(id=number, body=body, session=session), blobs))
        header, answer_blobs = decode_reply(socket.recv_multipart())
        assert header.id == number
        return header.body, answer_blobs

    try:
        welcome, _ = ask(1, Hello(protocol_versions=[PROTOCOL_VERSION], client="req"))
        assert isinstance(welcome, Welcome)
        status, _ = ask(2, GetStatus())
        assert isinstance(status, Status)
        prompt = np.array(PROMPT, "<i4").tobytes()
        generate = Generate(prompt_lengths=[len(PROMPT)], sampling=GREEDY, stream=False)
        finished, blobs = ask(3, generate, welcome.session, prompt)
        assert isinstance(finished, GenerationFinished)
        assert len(np.frombuffer(blobs[0], "<i4")) == len(np.frombuffer(blobs[1], "<f4")) == 12
    finally:
        socket.close(linger=0)
        context.term()
