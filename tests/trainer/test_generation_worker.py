"""The reference's interface against a real daemon: batches, URLs, weights, sleep, metrics, the end."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from refit_protocol.errors import ErrorCode
from refit_trainer import BroadcastGroup, Daemon, LayoutMismatch, RefitdError, Sampling, share_parameters
from refit_trainer.generation_worker import GenerationWorker
from refit_trainer.worker_batches import Batch
from tests.daemon_process import DaemonProcess
from tests.ports import reserved_port
from tests.worker.models import random_model

PAD = 2
PROMPTS = [[5, 60, 7, 400, 9], [17], [230, 99, 4]]
CONFIG = {"_pad_token_id": PAD, "max_new_tokens": 6, "vllm_cfg": {"ignore_eos": True}}

_Result = TypeVar("_Result")
Make = Callable[..., GenerationWorker]


@pytest.fixture(scope="module")
def serving_a(daemon_process: DaemonProcess, fresh_sample: object) -> None:
    """Whatever an earlier test left behind, this module begins with weights A."""
    with daemon_process.connect() as daemon:
        daemon.refit(share_parameters(random_model("qwen3", seed=0)))


@pytest.fixture
def make(daemon_process: DaemonProcess, serving_a: None) -> Iterator[Make]:
    """Workers connected to the session's daemon."""
    made: list[GenerationWorker] = []

    def connected(**config: Any) -> GenerationWorker:
        made.append(GenerationWorker({**CONFIG, "endpoint": daemon_process.endpoint, **config}))
        return made[-1]

    yield connected
    for worker in made:
        asyncio.run(worker.shutdown())


@pytest.fixture
def worker(make: Make) -> GenerationWorker:
    return make()


def batch_of(prompts: list[list[int]], width: int | None = None, **more: Any) -> dict[str, Any]:
    width = width or max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), PAD)
    for row, prompt in zip(input_ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return {"input_ids": input_ids, "input_lengths": torch.tensor([len(prompt) for prompt in prompts]), **more}


def generated(worker: GenerationWorker, data: dict[str, Any], greedy: bool = True) -> dict[int, Batch]:
    async def collect() -> list[tuple[int, Batch]]:
        return [item async for item in worker.generate_async(data, greedy)]

    items = asyncio.run(collect())
    assert len(dict(items)) == len(items), "an index came twice"
    return dict(items)


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    return asyncio.run(work)


# --- generation ---


def test_each_prompt_of_a_batch_comes_back_padded_on_the_right(worker: GenerationWorker, daemon: Daemon) -> None:
    """Prompt, generation, padding; logprobs only where tokens were generated, and the same as the client's own."""
    results = generated(worker, batch_of(PROMPTS, width=13))
    assert sorted(results) == [0, 1, 2]
    for index, prompt in enumerate(PROMPTS):
        batch = results[index]
        alone = daemon.generate_one(prompt, Sampling(max_tokens=6, temperature=0.0, ignore_eos=True))
        end = len(prompt) + 6
        assert batch["output_ids"].dtype == torch.int64
        assert batch["output_ids"].tolist() == [[*prompt, *alone.token_ids.tolist(), *[PAD] * (13 - end)]]
        assert batch["logprobs"].shape == (1, 13)
        assert (batch["logprobs"] != 0).nonzero()[:, 1].tolist() == list(range(len(prompt), end))
        assert batch["logprobs"][0, len(prompt) : end].tolist() == pytest.approx(alone.logprobs.tolist(), abs=0.05)
        assert batch["generation_lengths"].tolist() == [6]
        assert batch["unpadded_sequence_lengths"].tolist() == [end]
        assert batch["truncated"].tolist() == [True]
        assert "routed_experts" not in batch


def test_an_output_wider_than_its_batch_is_not_cut(worker: GenerationWorker) -> None:
    assert generated(worker, batch_of([[5]]))[0]["output_ids"].shape == (1, 7)


def test_stop_strings_differ_by_prompt_and_add_to_the_common_ones(make: Make, daemon: Daemon) -> None:
    """A sample that met one is not truncated; its last token completed the string."""
    text = daemon.generate_one(
        PROMPTS[0], Sampling(max_tokens=6, temperature=0.0, ignore_eos=True, text=True, skip_special_tokens=False)
    ).text
    stop = next(character for character in text if character.isascii())
    worker = make(stop_strings=["never this"])
    results = generated(worker, batch_of([PROMPTS[0]] * 2, stop_strings=[[stop], None]))
    assert results[0]["truncated"].tolist() == [False]
    assert results[0]["generation_lengths"] < 6
    assert results[1]["generation_lengths"].tolist() == [6]


def test_a_prompt_that_fills_the_context_is_reported_truncated(worker: GenerationWorker) -> None:
    """Nothing can be generated for it; the others of the batch are served."""
    full = [5] * 256
    results = generated(worker, batch_of([full, [7]]))
    assert results[0]["output_ids"].tolist() == [full]
    assert results[0]["generation_lengths"].tolist() == [0]
    assert results[0]["unpadded_sequence_lengths"].tolist() == [256]
    assert results[0]["truncated"].tolist() == [True]
    assert not results[0]["logprobs"].any()
    assert results[1]["generation_lengths"].tolist() == [6]


def test_without_a_limit_the_context_is_the_limit(make: Make) -> None:
    assert generated(make(max_new_tokens=None), batch_of([[5] * 250]))[0]["generation_lengths"].tolist() == [6]


def test_sampling_follows_the_configuration_unless_greedy(make: Make) -> None:
    """At temperature 1 two samples of one prompt differ, greedily they do not."""
    worker = make(max_new_tokens=20, temperature=1.0, top_p=1.0, top_k=None)
    twice = batch_of([PROMPTS[0]] * 2)
    hot, cold = generated(worker, twice, greedy=False), generated(worker, twice, greedy=True)
    assert hot[0]["output_ids"].tolist() != hot[1]["output_ids"].tolist()
    assert cold[0]["output_ids"].tolist() == cold[1]["output_ids"].tolist()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"input_ids": torch.tensor([5]), "input_lengths": torch.tensor([1])}, "shape"),
        ({"input_ids": torch.tensor([[5]]), "input_lengths": torch.tensor([2])}, "length 2"),
        ({"input_ids": torch.tensor([[5]]), "input_lengths": torch.tensor([0])}, "length 0"),
        ({"input_ids": torch.tensor([[PAD, 5]]), "input_lengths": torch.tensor([1])}, "padded on the right"),
        (batch_of([[5]], stop_strings=[None, None]), "stop_strings has 2"),
    ],
)
def test_what_is_no_batch_is_refused(worker: GenerationWorker, data: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        generated(worker, data)


def test_a_refusal_of_the_daemon_reaches_the_caller(worker: GenerationWorker) -> None:
    """An id outside the vocabulary: a typed error, where the reference's worker says nothing."""
    with pytest.raises(RefitdError) as refused:
        generated(worker, batch_of([[5], [512]]))
    assert refused.value.code is ErrorCode.INVALID_PROMPT


def test_leaving_the_generator_cancels_the_rest(make: Make, daemon: Daemon) -> None:
    """The engine works on nothing once the iteration was left."""
    worker = make(max_new_tokens=250)

    async def leave() -> None:
        results = worker.generate_async(batch_of([[5], [6], [7] * 250]))
        assert (await anext(results))[0] == 2
        await results.aclose()

    run(leave())
    while daemon.status().running_requests:
        assert daemon.status().running_requests <= 2


def test_texts_go_in_and_come_out(worker: GenerationWorker, daemon: Daemon) -> None:
    prompts = ["The daemon owns", "Reward rises"]

    async def collect() -> dict[int, Batch]:
        return {index: batch async for index, batch in worker.generate_text_async({"prompts": prompts}, greedy=True)}

    results = run(collect())
    sampling = Sampling(max_tokens=6, temperature=0.0, top_k=1, ignore_eos=True, text=True)
    assert results == {
        index: {"texts": [daemon.generate_one(text, sampling).text]} for index, text in enumerate(prompts)
    }


# --- weights ---


def test_the_trainer_refits_while_the_worker_waits(worker: GenerationWorker) -> None:
    """True comes once the new weights are served, whether the trainer was first or last."""
    model = share_parameters(random_model("qwen3", seed=1))
    before = generated(worker, batch_of(PROMPTS))
    info = {name: (tuple(value.shape), value.dtype) for name, value in model.named_parameters()}

    async def both() -> bool:
        await worker.prepare_refit_info_async(info)
        waiting = asyncio.create_task(worker.update_weights_via_ipc_zmq_async())
        await asyncio.sleep(0)
        await asyncio.to_thread(trainer.refit, model)
        return await waiting

    with Daemon.connect(worker.endpoint, client="trainer") as trainer:
        assert run(both())
        assert any(
            (generated(worker, batch_of(PROMPTS))[i]["output_ids"] != before[i]["output_ids"]).any() for i in before
        )
        trainer.refit(share_parameters(random_model("qwen3", seed=0)))
        assert run(worker.update_weights_via_ipc_zmq_async())
    after = generated(worker, batch_of(PROMPTS))
    assert all(after[i]["output_ids"].tolist() == before[i]["output_ids"].tolist() for i in before)


def test_weights_that_do_not_fit_are_named_before_they_are_sent(worker: GenerationWorker) -> None:
    with pytest.raises(LayoutMismatch, match=r"lm_head.weight.*unexpected \['odd'\]"):
        run(worker.prepare_refit_info_async({"odd": ((1,), torch.float32)}))


def test_weights_come_by_collective(worker: GenerationWorker, daemon: Daemon) -> None:
    """The trainer hosts the group and broadcasts; the worker's engine joins, commits, and serves what was sent."""
    tensors = [dict(random_model("qwen3", seed=seed).named_parameters()) for seed in (1, 0)]
    with reserved_port() as port, ThreadPoolExecutor(1) as trainer:
        hosting = trainer.submit(BroadcastGroup.host, "127.0.0.1", port, 2)
        run(worker.init_collective_async(0, "127.0.0.1", port, 2, 1))
        with hosting.result() as group:
            shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors[0].items()}
            run(worker.prepare_refit_info_async(shapes))
            for weights in tensors:
                sending = trainer.submit(group.broadcast, weights)
                assert run(worker.update_weights_from_collective_async())
                sending.result()
                assert daemon.verify(weights, full=True)


def test_a_collective_that_cannot_be_is_said_so(worker: GenerationWorker) -> None:
    """No group yet; no room for the worker's ranks in it."""
    for call, code in (
        (worker.update_weights_from_collective_async(), ErrorCode.NOT_ALLOWED_NOW),
        (worker.init_collective_async(1, "127.0.0.1", 1, 2, 1), ErrorCode.INVALID_DESCRIPTOR),
    ):
        with pytest.raises(RefitdError) as refused:
            run(call)
        assert refused.value.code is code


# --- the engine's life ---


def test_devices_and_urls_are_reported(worker: GenerationWorker, daemon: Daemon) -> None:
    run(worker.post_init_async())
    assert worker.vllm_device_ids == run(worker.report_device_id_async()) == daemon.status().devices
    url = run(worker.get_reserved_url())
    assert url is not None
    assert url == run(worker.report_dp_openai_server_base_url()) == daemon.status().http_url


def test_sleep_wake_and_cache(worker: GenerationWorker) -> None:
    """Asleep it says so instead of generating."""
    run(worker.reset_prefix_cache_async())
    run(worker.sleep_async())
    with pytest.raises(RefitdError) as refused:
        generated(worker, batch_of([[5]]))
    assert refused.value.code is ErrorCode.ASLEEP
    run(worker.wake_up_async(tags=["weights"]))
    run(worker.wake_up_async())
    assert generated(worker, batch_of([[5]]))


def test_logger_metrics_are_got_and_cleared(worker: GenerationWorker) -> None:
    """Lists of one length by the reference's names."""
    while not (metrics := worker.get_vllm_logger_metrics()):
        run(worker.report_device_id_async())
    assert {"inflight_batch_sizes", "num_pending_samples"} <= set(metrics)
    samples = len(metrics["inflight_batch_sizes"])
    assert {len(values) for values in metrics.values()} == {samples}
    assert samples > 0
    worker.clear_vllm_logger_metrics()
    assert len(worker.get_vllm_logger_metrics().get("inflight_batch_sizes", [])) < samples


def test_shutdown_leaves_nothing_running(make: Make) -> None:
    """No thread of the worker stays; a second shutdown does no harm, other calls say that it is over."""
    before = threading.active_count()
    worker = make()
    assert run(worker.shutdown())
    assert run(worker.shutdown())
    assert threading.active_count() == before
    with pytest.raises(RefitdError, match="closed"):
        worker.get_vllm_logger_metrics()
    with pytest.raises(RefitdError, match="shut down"):
        run(worker.report_device_id_async())


# --- a daemon of its own ---


def own_config(model_path: Path) -> dict[str, Any]:
    return {
        **CONFIG,
        "model_name": str(model_path),
        "vllm_cfg": {"max_model_len": 256, "enforce_eager": True, "expose_http_server": True, "ignore_eos": True},
        "vllm_kwargs": {"max_num_batched_tokens": 512},
        "refitd": {"engine.cpu_kv_cache_gib": 1, "engine.max_num_seqs": 8},
    }


@pytest.mark.slow
def test_a_worker_may_start_its_daemon_and_load_later(model_path: Path) -> None:
    """The URL is known before the load; after it the worker generates; after its end the daemon is gone."""
    worker = GenerationWorker(own_config(model_path), seed=7, defer_model_load=True)
    try:
        url = run(worker.get_reserved_url())
        assert url is not None
        assert run(worker.report_dp_openai_server_base_url()) is None
        with pytest.raises(RefitdError) as early:
            generated(worker, batch_of([[5]]))
        assert early.value.code is ErrorCode.LOADING
        worker.load_model()
        assert run(worker.report_dp_openai_server_base_url()) == url
        assert generated(worker, batch_of([[5]]))[0]["generation_lengths"].tolist() == [6]
    finally:
        assert worker._child is not None
        pid = worker._child.pid
        assert run(worker.shutdown())
    assert not Path(f"/proc/{pid}").exists()


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RefitdError, match=r"exit code 2: .*does not exist"):
        GenerationWorker({"model_name": str(tmp_path / "nothing")})


PARENT = """
import sys, time
from refit_trainer.generation_worker import GenerationWorker
worker = GenerationWorker({"model_name": sys.argv[1]}, defer_model_load=True)
print(worker._child.pid, flush=True)
sys.stdin.read()
"""


def test_a_daemon_of_a_killed_worker_ends_too(model_path: Path) -> None:
    """Its own process is watched, not only its thread."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    poller = select.poll()
    poller.register(child, select.POLLIN)
    assert poller.poll(30_000), "the daemon outlived its worker"
    os.close(child)
