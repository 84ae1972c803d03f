"""Memfds of another process: opened when they are what was announced, refused with a reason otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import CudaIpcSegment, MemfdSegment
from refitd.worker.memory import map_memfd, open_segment
from refitd.worker.opening import open_bell
from tests.worker.trainers import ExportedMemory

CPU = torch.device("cpu")


def segment_of(memory: ExportedMemory, **changes: int) -> MemfdSegment:
    described = {key: value for key, value in memory.segment.items() if key != "kind"}
    return MemfdSegment(**{**described, **changes})


def refusal(segment: MemfdSegment | CudaIpcSegment) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        open_segment(segment, CPU)
    return caught.value


def test_mapping_sees_later_writes_and_outlives_the_owner() -> None:
    """The memory is shared, and stays readable after the trainer closed it."""
    with ExportedMemory(4096) as memory:
        mapping = open_segment(segment_of(memory), CPU)
        memory.data[17] = 42
    assert mapping.data[17] == 42
    mapping.close()


def test_closing_unmaps() -> None:
    """Nothing of the memory stays in the process's address space."""
    with ExportedMemory(1 << 20) as memory:
        before = Path("/proc/self/maps").read_text().count("memfd:exported")
        mapping = open_segment(segment_of(memory), CPU)
        assert Path("/proc/self/maps").read_text().count("memfd:exported") == before + 1
        mapping.close()
        assert Path("/proc/self/maps").read_text().count("memfd:exported") == before


def test_unsealed_memory_is_refused() -> None:
    """Memory that could be truncated under the reader would end the engine by SIGBUS."""
    with ExportedMemory(4096, seals=0) as memory:
        error = refusal(segment_of(memory))
    assert error.code is ErrorCode.MEMORY_UNAVAILABLE
    assert "F_SEAL_SHRINK" in error.message


def test_what_is_rung_is_written_and_checked_like_memory_that_is_read() -> None:
    """Both sides see each other's words; unsealed memory is refused here too."""
    with ExportedMemory(4096) as memory:
        mapped = map_memfd(segment_of(memory), writable=True)
        mapped[64] = 7
        memory.data[65] = 8
        assert (int(memory.data[64]), mapped[65]) == (7, 8)
        with pytest.raises(TypeError):
            map_memfd(segment_of(memory))[64] = 7
        mapped.close()
    with ExportedMemory(4096, seals=0) as memory, pytest.raises(ProtocolError) as refused:
        map_memfd(segment_of(memory), writable=True)
    assert refused.value.code is ErrorCode.MEMORY_UNAVAILABLE


def test_a_processor_waits_for_no_bell() -> None:
    """Whatever it is: nothing is opened."""
    assert open_bell(MemfdSegment(pid=1, fd=10**6, inode=1, size_bytes=4096), 0, CPU) is None
    assert open_bell(None, 0, CPU) is None


def test_another_inode_is_refused() -> None:
    """File descriptor numbers and pids are reused; the inode tells."""
    with ExportedMemory(4096) as memory:
        error = refusal(segment_of(memory, inode=memory.segment["inode"] + 1))
    assert "not the announced" in error.message


def test_memory_smaller_than_announced_is_refused() -> None:
    with ExportedMemory(4096) as memory:
        error = refusal(segment_of(memory, size_bytes=8192))
    assert "4096 bytes, not the announced 8192" in error.message


def test_memory_that_could_never_be_backed_is_refused() -> None:
    """Reading the holes of a sparse segment would need more memory than there is."""
    with ExportedMemory(1 << 44) as memory:
        error = refusal(segment_of(memory))
    assert "sparse" in error.message


def test_closed_descriptor_is_refused() -> None:
    with ExportedMemory(4096) as memory:
        segment = segment_of(memory)
    assert "is not open there" in refusal(segment).message


def test_vanished_process_is_refused() -> None:
    with ExportedMemory(4096) as memory:
        assert "process is gone" in refusal(segment_of(memory, pid=2**22 - 1)).message


def test_ordinary_files_and_pipes_are_refused(tmp_path: Path) -> None:
    """A fifo is not even opened, which could block for ever."""
    reader, writer = os.pipe()
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 4096)
    try:
        for fd in (reader, file):
            segment = MemfdSegment(pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino, size_bytes=4096)
            assert refusal(segment).code is ErrorCode.MEMORY_UNAVAILABLE
    finally:
        for fd in (reader, writer, file):
            os.close(fd)


def test_device_memory_is_unsupported_on_cpu() -> None:
    segment = CudaIpcSegment(pid=1, device_uuid="GPU-0", handle=bytes(64), size_bytes=4096)
    assert refusal(segment).code is ErrorCode.UNSUPPORTED
