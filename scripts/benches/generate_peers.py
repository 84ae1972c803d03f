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
from pathlib import Path
from typing import IO, Any
from urllib.error import URLError
from urllib.request import urlopen

from tests.daemon_process import ONE_THREAD

MODEL_LEN, SEQUENCES = 256, 64
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
    **ONE_THREAD,
}


def prompt_of(stream: int) -> list[int]:
    return [5 + stream, 60, 7, 400, 9, 33, 21, 250]


@contextmanager
def in_process_peer(model: Path) -> Iterator[InProcessPeer]:
    with _child(
        ["-m", "scripts.benches.generate_peers", str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        yield InProcessPeer(child.stdin, child.stdout)
        child.stdin.close()


class InProcessPeer:
    def __init__(self, orders: IO[bytes], answers: IO[bytes]) -> None:
        self._orders, self._answers = orders, answers

    def round(self, streams: int, tokens: int) -> dict[str, float]:
        """Seconds for all streams to end, and to the first token of the first to have one."""
        self._orders.write(json.dumps([streams, tokens]).encode() + b"\n")
        self._orders.flush()
        answer: dict[str, float] = json.loads(self._answers.readline())
        return answer


@contextmanager
def http_peer(model: Path) -> Iterator[str]:
    """The URL of vLLM's own server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"model": model, "port": port, "host": "127.0.0.1", "max-model-len": MODEL_LEN, "max-num-seqs": SEQUENCES}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    more = ["--enforce-eager", "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
    with _child(["-m", "vllm.entrypoints.openai.api_server", *flags, *more], stdout=subprocess.DEVNULL) as child:
        url = f"http://127.0.0.1:{port}"
        _wait_healthy(url, child)
        yield url


def _wait_healthy(url: str, child: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up_at:
        if child.poll() is not None:
            raise RuntimeError(f"vLLM's server ended with exit code {child.returncode}")
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError("vLLM's server did not become healthy")


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


async def _serve(model: str, answers: IO[str]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=model,
        max_model_len=MODEL_LEN,
        max_num_seqs=SEQUENCES,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
    )
    llm = AsyncLLM.from_engine_args(arguments)
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

    uvloop.run(_serve(sys.argv[1], _own_answers()))
