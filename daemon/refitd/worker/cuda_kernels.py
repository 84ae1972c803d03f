"""Launches the kernels of `kernels.cu` on PyTorch's current stream. Imported only where the engine runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files

import cupy
import numpy as np
import torch

THREADS = 256
COPY_THREADS = 1024


def launch(name: str, blocks: int, threads: int, *arguments: torch.Tensor | int) -> None:
    """Enqueues a kernel; tensors are passed by address and must be on the current device, numbers as 32 bits."""
    prepared(name, blocks, threads, *arguments)()


def prepared(name: str, blocks: int, threads: int, *arguments: torch.Tensor | int) -> Callable[[], None]:
    """A launch for many times: everything but the stream is settled now. The caller keeps the tensors."""
    kernel, passed = _kernel(name), tuple(_passed(argument) for argument in arguments)

    def enqueue() -> None:
        with _stream(torch.cuda.current_stream().cuda_stream):
            kernel((blocks,), (threads,), passed)

    return enqueue


def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def compile_kernels() -> None:
    """Takes about a second the first time on a machine; the result is cached in CuPy's directory."""
    _module().compile()


@cache
def _stream(pointer: int) -> cupy.cuda.ExternalStream:
    return cupy.cuda.ExternalStream(pointer)


@cache
def _kernel(name: str) -> cupy.RawKernel:
    return _module().get_function(name)


@cache
def _module() -> cupy.RawModule:
    source = files("refitd.worker").joinpath("kernels.cu").read_text()
    return cupy.RawModule(code=source, options=("-std=c++17",))


def _passed(argument: torch.Tensor | int) -> np.uint64 | np.uint32:
    return np.uint64(argument.data_ptr()) if isinstance(argument, torch.Tensor) else np.uint32(argument)
