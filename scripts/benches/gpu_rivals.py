"""Other ways to get a trainer's weights into vLLM, each as its project documents it, on an engine of their own."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch
import zmq
from torch.multiprocessing.reductions import reduce_tensor

try:
    from checkpoint_engine.worker import VllmColocateWorkerExtension
except ImportError:
    VllmColocateWorkerExtension = object

Named = tuple[str, torch.Tensor]


class RivalExtension(VllmColocateWorkerExtension):
    """checkpoint-engine's own worker methods, and the plain way: rebuild torch's handles, load."""

    def load_from_handles(self, pickled: bytes) -> None:
        # What most frameworks do; the parent is this benchmark itself.
        names, handles = pickle.loads(pickled)  # noqa: S301
        weights = [(name, rebuild(*arguments)) for name, (rebuild, arguments) in zip(names, handles, strict=True)]
        with torch.no_grad():
            self.model_runner.model.load_weights(weights)
        torch.cuda.synchronize()


class Rivals:
    """One vLLM engine and the trainer's tensors."""

    def __init__(self, llm: Any, tensors: Sequence[Named]) -> None:
        self._llm = llm
        self._tensors = tensors
        self._uuid = str(torch.cuda.get_device_properties(0).uuid)
        self._buffer: torch.Tensor | None = None

    @classmethod
    @contextmanager
    def started(cls, model: Path, tensors: Sequence[Named]) -> Iterator[Self]:
        with tempfile.TemporaryDirectory() as stubs:
            _prepare_environment(Path(stubs))
            from vllm import LLM
            from vllm.config import WeightTransferConfig

            llm = LLM(
                model=str(model),
                load_format="dummy",
                dtype="bfloat16",
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=2048,
                gpu_memory_utilization=0.3,
                weight_transfer_config=WeightTransferConfig(backend="ipc"),
                worker_extension_cls="scripts.benches.gpu_rivals.RivalExtension",
            )
            try:
                yield cls(llm, tensors)
            finally:
                with suppress(AttributeError):
                    llm.llm_engine.engine_core.shutdown()

    def ways(self) -> dict[str, Callable[[], None]]:
        ways: dict[str, Callable[[], None]] = {"vllm_ipc": self.vllm_ipc, "torch_handles": self.torch_handles}
        if VllmColocateWorkerExtension is not object:
            ways["checkpoint_engine"] = self.checkpoint_engine
        return ways

    def vllm_ipc(self) -> None:
        """`start_weight_update`, one unpacked `update_weights`, `finish_weight_update`; no HTTP."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerSendWeightsArgs, IPCWeightTransferEngine

        def send(update: Any) -> None:
            from dataclasses import asdict

            self._llm.update_weights({"update_info": asdict(update)})

        self._llm.start_weight_update()
        IPCWeightTransferEngine.trainer_send_weights(iter(self._tensors), IPCTrainerSendWeightsArgs(send_mode=send))
        self._llm.finish_weight_update()

    def torch_handles(self) -> None:
        """PyTorch's reductions for every tensor, rebuilt in the worker, through vLLM's loader."""
        handles = [reduce_tensor(tensor) for _, tensor in self._tensors]
        payload = pickle.dumps(([name for name, _ in self._tensors], handles))
        self._llm.collective_rpc("load_from_handles", args=(payload,))

    def checkpoint_engine(self) -> None:
        """Its worker's protocol with a sender whose tensors are on the device: two buffer halves, packed in turn."""
        half_bytes = max(tensor.nbytes for _, tensor in self._tensors)
        if self._buffer is None:
            self._buffer = torch.empty(2 * half_bytes, dtype=torch.uint8, device="cuda")
        address = f"ipc:///tmp/refit-bench-{os.getpid()}"
        handles = {f"GPU-{self._uuid}": address}
        worker = threading.Thread(
            target=self._llm.collective_rpc, args=("update_weights_from_ipc",), kwargs={"args": (handles,)}
        )
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.bind(address)
            worker.start()
            _ask(socket, reduce_tensor(self._buffer))
            self._send_halves(socket, half_bytes)
            for _ in range(2):
                _ask(socket, None)
            worker.join()

    def _send_halves(self, socket: zmq.Socket[bytes], half_bytes: int) -> None:
        assert self._buffer is not None
        waiting = False
        for number, group in enumerate(_groups(self._tensors, half_bytes)):
            begin = number % 2 * half_bytes
            metadata = _pack(group, self._buffer, begin)
            torch.cuda.synchronize()
            if waiting:
                _check(socket.recv())
            socket.send_pyobj(metadata)
            waiting = True
        _check(socket.recv())


def _groups(tensors: Sequence[Named], most_bytes: int) -> Iterator[list[Named]]:
    group: list[Named] = []
    used = 0
    for name, tensor in tensors:
        if group and used + tensor.nbytes + 256 > most_bytes:
            yield group
            group, used = [], 0
        group.append((name, tensor))
        used += -(-tensor.nbytes // 256) * 256
    yield group


def _pack(group: Sequence[Named], buffer: torch.Tensor, begin: int) -> list[dict[str, Any]]:
    metadata = []
    for name, tensor in group:
        buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        metadata.append({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": begin})
        begin += -(-tensor.nbytes // 256) * 256
    return metadata


def _ask(socket: zmq.Socket[bytes], message: object) -> None:
    socket.send_pyobj(message)
    _check(socket.recv())


def _check(answer: bytes) -> None:
    if answer:
        raise RuntimeError(answer.decode()[-500:])


def _prepare_environment(stubs: Path) -> None:
    """vLLM's transfer imports ray at its top without needing it here; its handles are pickles."""
    (stubs / "ray.py").write_text("")
    sys.path.append(str(stubs))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd()), str(stubs)]
    )
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
