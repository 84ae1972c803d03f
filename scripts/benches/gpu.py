"""Refits of the Qwen3-8B shape on one GPU, beside a plain copy and beside other ways to move weights into vLLM."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from scripts.benches.figures import Figure, at_least, at_most
from scripts.benches.gpu_rivals import Rivals
from tests.daemon_process import DaemonProcess, running_daemon
from transformers import Qwen3Config, Qwen3ForCausalLM

from refit_trainer import Daemon, RefitReport, Sampling, share_parameters

ROUNDS = 25
SLOW_ROUNDS = 5
STREAMS = 8
# A short one of a trainer's: between two refits processors and threads have been at other things, or asleep.
STEP_SECONDS = 0.05
# Longer than an engine has to be idle before a refit stands by, and than that takes.
STAND_BY_SECONDS = 0.25
BUCKET_BYTES = 2 << 30
QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "architectures": ["Qwen3ForCausalLM"],
}
ENGINE = (
    "engine.load_format=dummy",
    "engine.tokenizer=false",
    "engine.dtype=bfloat16",
    "engine.max_model_len=2048",
    "engine.gpu_memory_utilization=0.3",
    "engine.max_num_seqs=8",
    # Decoding as it is served, without the minutes that torch.compile takes.
    "engine.enforce_eager=false",
    'engine.extra.compilation_config={mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 4, 8]}',
)
PHASES = ("validate", "gate", "copy", "attest", "publish", "total")


def measure() -> Iterator[Figure]:
    """Starts two engines beside a trainer of 16.4 GB; about three minutes on one H200."""
    with tempfile.TemporaryDirectory(prefix="refitd-bench-") as name:
        directory = Path(name)
        config = Qwen3Config(**QWEN3_8B)
        config.save_pretrained(directory / "model")
        model = _random_model(config)
        total_bytes = sum(parameter.nbytes for parameter in model.parameters())
        yield Figure("refit_bytes", total_bytes, "bytes")
        copy = _plain_copy(total_bytes)
        yield Figure("plain_copy", copy * 1e3, "ms")
        torch.cuda.empty_cache()
        with running_daemon(directory / "model", directory / "run", *ENGINE) as process:
            inplace = yield from _inplace(process, model, copy, total_bytes)
            yield from _standing(process, model, copy)
            yield from _bucket(process, model, copy)
            yield from _rivals(directory / "model", model, inplace, total_bytes)
        again = _plain_copy(total_bytes)
        yield Figure("plain_copy_again", again * 1e3, "ms", again / copy)


def _inplace(process: DaemonProcess, model: Qwen3ForCausalLM, copy: float, total_bytes: int) -> Iterator[Figure]:
    """Returns the seconds of a refit with the engine idle."""
    with process.connect() as daemon:
        free = _free_bytes()
        share_parameters(model)
        started = time.perf_counter()
        daemon.refit(model)
        yield Figure("inplace_first", (time.perf_counter() - started) * 1e3, "ms")
        reports: list[RefitReport] = []
        inplace = _median(lambda: reports.append(daemon.refit(model)), ROUNDS)
        yield Figure("inplace_extra_device_memory", free - _free_bytes(), "bytes")
        yield at_most("inplace_vs_copy", inplace * 1e3, "ms", 1.10, ratio=inplace / copy)
        yield from _phases("inplace", reports)
        later = _median(lambda: daemon.refit(model), ROUNDS, STEP_SECONDS)
        yield Figure("inplace_after_a_step", later * 1e3, "ms", later / copy)
        for attest in ("off", "full"):
            seconds = _median(lambda attest=attest: daemon.refit(model, attest=attest), ROUNDS)
            yield Figure(f"inplace_attest_{attest}", seconds * 1e3, "ms", seconds / copy)
        yield from _prepared(daemon, model, copy, "prepared_vs_copy")
        yield from _digest(daemon, total_bytes)
        yield Figure("status", _median(daemon.status, 200) * 1e3, "ms")
        with _streams(process, STREAMS):
            reports.clear()
            keep = _median(lambda: reports.append(daemon.refit(model, policy="keep")), ROUNDS)
            yield at_most("inplace_keep_vs_copy", keep * 1e3, "ms", 1.10, ratio=keep / copy)
            yield from _phases("inplace_keep", reports)
            yield from _prepared(daemon, model, copy, "prepared_keep_vs_copy")
            beside = _plain_copy(total_bytes)
            yield Figure("plain_copy_beside_streams", beside * 1e3, "ms", beside / copy)
            yield Figure("inplace_keep_vs_copy_beside_streams", keep * 1e3, "ms", keep / beside)
            torch.cuda.empty_cache()
    return inplace


def _prepared(daemon: Daemon, model: Qwen3ForCausalLM, copy: float, name: str) -> Iterator[Figure]:
    """A refit that was announced, as before an optimizer's step: from the call that copies to its return."""
    seconds: list[float] = []
    for _ in range(ROUNDS):
        with daemon.prepare_refit(model, policy="keep"):
            # A step of a trainer, long enough that nothing of the preparation is still under way.
            time.sleep(STEP_SECONDS)
            torch.cuda.synchronize()
            started = time.perf_counter()
            daemon.refit(model, policy="keep")
            seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    yield at_most(name, median * 1e3, "ms", 1.10, ratio=median / copy)


def _standing(process: DaemonProcess, model: Qwen3ForCausalLM, copy: float) -> Iterator[Figure]:
    """The same `refit()` of a trainer that has asked for one to stand by."""
    with process.connect(stand_by=True) as daemon:
        daemon.refit(model)
        reports: list[RefitReport] = []
        standing = _median(lambda: reports.append(daemon.refit(model)), ROUNDS, STAND_BY_SECONDS)
        yield at_most("standing_vs_copy", standing * 1e3, "ms", 1.10, ratio=standing / copy)
        stood_by = sum(report.stood_by for report in reports[-ROUNDS:])
        yield Figure("standing_refits_that_stood_by", stood_by, f"of {ROUNDS}")
        yield from _phases("standing", reports)


def _bucket(process: DaemonProcess, model: Qwen3ForCausalLM, copy: float) -> Iterator[Figure]:
    with process.connect(bucket_bytes=BUCKET_BYTES) as daemon:
        free = _free_bytes()
        tensors = dict(model.named_parameters())
        started = time.perf_counter()
        daemon.refit(tensors)
        yield Figure("bucket_first", (time.perf_counter() - started) * 1e3, "ms")
        reports: list[RefitReport] = []
        bucket = _median(lambda: reports.append(daemon.refit(tensors)), ROUNDS)
        yield Figure("bucket_extra_device_memory", free - _free_bytes(), "bytes")
        yield at_most("bucket_vs_copy", bucket * 1e3, "ms", 2.3, ratio=bucket / copy)
        yield from _phases("bucket", reports)
        later = _median(lambda: daemon.refit(tensors), ROUNDS, STEP_SECONDS)
        yield Figure("bucket_after_a_step", later * 1e3, "ms", later / copy)


def _digest(daemon: Daemon, total_bytes: int) -> Iterator[Figure]:
    """Against reading the bytes once, which a sum in the widest type does at the speed of memory."""
    words = torch.empty(total_bytes // 8, dtype=torch.int64, device="cuda").fill_(3)

    def read() -> None:
        torch.sum(words)
        torch.cuda.synchronize()

    once = _median(read, ROUNDS)
    yield Figure("read_once", once * 1e3, "ms")
    full = _median(lambda: daemon.digest("full"), ROUNDS)
    yield at_most("digest_full_vs_read", full * 1e3, "ms", 1.5, ratio=full / once)
    sampled = _median(lambda: daemon.digest("sampled"), ROUNDS)
    yield Figure("digest_sampled", sampled * 1e3, "ms")


def _rivals(path: Path, model: Qwen3ForCausalLM, inplace: float, total_bytes: int) -> Iterator[Figure]:
    tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    with Rivals.started(path, tensors) as rivals:
        for name, way in rivals.ways().items():
            try:
                seconds = _median(way, SLOW_ROUNDS)
            # A rival that does not run here must not take the other figures along.
            except Exception as error:  # noqa: BLE001
                print(f"{name}: did not run: {type(error).__name__}: {error}")
                continue
            yield at_least(f"{name}_vs_inplace", seconds * 1e3, "ms", 5.0, ratio=seconds / inplace)
            yield Figure(f"{name}_rate", total_bytes / seconds / 1e9, "GB/s")


def _phases(name: str, reports: list[RefitReport]) -> Iterator[Figure]:
    for phase in PHASES:
        yield Figure(f"{name}_{phase}", statistics.median(getattr(r.milliseconds, phase) for r in reports), "ms")


@contextmanager
def _streams(process: DaemonProcess, count: int) -> Iterator[None]:
    """`count` generations in flight, renewed as they end, in a session of their own."""
    stop = threading.Event()

    def generate() -> None:
        with process.connect("streams") as daemon:
            prompts = [[7, 11, 13, index] for index in range(count)]
            while not stop.is_set():
                with daemon.stream(prompts, Sampling(max_tokens=1500, ignore_eos=True)) as deltas:
                    for _ in deltas:
                        running.set()
                        if stop.is_set():
                            break

    running = threading.Event()
    thread = threading.Thread(target=generate)
    thread.start()
    running.wait(60)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _random_model(config: Qwen3Config) -> Qwen3ForCausalLM:
    """Built on the device without transformers' initialisation, which takes longer than everything measured here."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    torch.cuda.synchronize()
    return model


def _plain_copy(total_bytes: int) -> float:
    """Seconds of one device-to-device copy of as many bytes, called and waited for like a refit."""
    source = torch.empty(total_bytes // 8, dtype=torch.int64, device="cuda").random_()
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return _median(copy, ROUNDS)


def _median(way: Callable[[], object], rounds: int, step_seconds: float = 0.0) -> float:
    way()
    way()
    seconds = []
    for _ in range(rounds):
        time.sleep(step_seconds)
        torch.cuda.synchronize()
        started = time.perf_counter()
        way()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
