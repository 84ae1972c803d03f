"""What the daemon is compared with: an AsyncLLM in the process that consumes its tokens, and vLLM's HTTP server.

`python -m scripts.benches.generate_peers MODEL` runs one round of the in-process engine for each line of standard
input and answers with a line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.error import URLError
from urllib.request import urlopen

from tests.daemon_process import SPARING

SEQUENCES = 64
START_SECONDS = 240.0
# As the daemon and its engine are started here: all three get the same threads.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    **SPARING,
}

CUDA_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}


def engine_options(*, on_gpu: bool) -> dict[str, Any]:
    """What each of the three engines is started with, by vLLM's names."""
    options = {"max_model_len": 256, "max_num_seqs": SEQUENCES, "logprobs_mode": "processed_logprobs"}
    if not on_gpu:
        return {**options, "enforce_eager": True}
    # A fixed cache: engines that start at the same time would misread each other's memory as their own.
    memory = {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 1 << 30}
    return {**options, **memory, "enforce_eager": False, "compilation_config": CUDA_GRAPHS}


def prompt_of(stream: int) -> list[int]:
    return [5 + stream, 60, 7, 400, 9, 33, 21, 250]


@contextmanager
def in_process_peer(model: Path, options: Mapping[str, Any]) -> Iterator[InProcessPeer]:
    """Still loading; the first round waits for it."""
    arguments = ["-m", "scripts.benches.generate_peers", str(model), json.dumps(options)]
    with _child(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        yield InProcessPeer(child.pid, child.stdin, child.stdout)
        child.stdin.close()


class InProcessPeer:
    def __init__(self, pid: int, orders: IO[bytes], answers: IO[bytes]) -> None:
        self.pid = pid
        self._orders, self._answers = orders, answers

    def round(self, streams: int, tokens: int) -> dict[str, float]:
        """Seconds for all streams to end, and to the first token of the first to have one."""
        self._orders.write(json.dumps([streams, tokens]).encode() + b"\n")
        self._orders.flush()
        answer: dict[str, float] = json.loads(self._answers.readline())
        return answer


@contextmanager
def http_peer(model: Path, options: Mapping[str, Any]) -> Iterator[HttpPeer]:
    """vLLM's own server, still loading."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = _flags({**options, "model": str(model), "host": "127.0.0.1", "port": port})
    more = ["--disable-uvicorn-access-log"]
    with _child(["-m", "vllm.entrypoints.openai.api_server", *flags, *more], stdout=subprocess.DEVNULL) as child:
        yield HttpPeer(f"http://127.0.0.1:{port}", child)


@dataclass(frozen=True)
class HttpPeer:
    url: str
    process: subprocess.Popen[bytes]

    def wait_healthy(self) -> None:
        give_up_at = time.monotonic() + START_SECONDS
        while time.monotonic() < give_up_at:
            if self.process.poll() is not None:
                raise RuntimeError(f"vLLM's server ended with exit code {self.process.returncode}")
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError("vLLM's server did not become healthy")


def _flags(options: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not False:
            flags += [flag, value if isinstance(value, str) else json.dumps(value)]
    return flags


@contextmanager
def _child(arguments: list[str], **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    environment: Mapping[str, str] = {**os.environ, **ENVIRONMENT}
    child = subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True, **pipes)
    try:
        yield child
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(30)
        # vLLM's server may leave its engine's process behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


# --- inside the child -------------------------------------------------------------------------------------------------


def _own_answers() -> IO[str]:
    """What was standard output; whatever vLLM and its processes write there goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


async def _serve(model: str, options: dict[str, Any], answers: IO[str]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **options))
    try:
        while order := await asyncio.to_thread(sys.stdin.readline):
            streams, tokens = json.loads(order)
            print(json.dumps(await _round(llm, streams, tokens)), file=answers, flush=True)
    finally:
        llm.shutdown()


async def _round(llm: Any, streams: int, tokens: int) -> dict[str, float]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    first: list[float] = []
    started = time.perf_counter()

    async def consume(stream: int) -> int:
        count = 0
        prompt = {"prompt_token_ids": prompt_of(stream)}
        async for output in llm.generate(prompt, params, f"{stream}-{started}"):
            if not count:
                first.append(time.perf_counter() - started)
            count += len(output.outputs[0].token_ids)
        return count

    counts = await asyncio.gather(*map(consume, range(streams)))
    assert counts == [tokens] * streams
    return {"seconds": time.perf_counter() - started, "first_seconds": min(first)}


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(sys.argv[1], json.loads(sys.argv[2]), _own_answers()))
