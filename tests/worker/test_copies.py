"""Compiled copies move exactly what they say, whatever the dtypes, strides and sizes."""

from __future__ import annotations

import torch

from refitd.worker.boxes import Box, Transfer
from refitd.worker.copies import MIN_BYTES_FOR_THREADS, Copy, CopyProgram


def run_of(offset: int, elements: int) -> Box:
    return Box(offset, (elements,), (1,))


def test_large_copies_arrive_whole() -> None:
    """More bytes than one chunk, shared between threads, at odd offsets."""
    elements = 5 * MIN_BYTES_FOR_THREADS + 3
    source = torch.randint(0, 255, (elements + 7,), dtype=torch.uint8)
    target = torch.zeros(elements + 2, dtype=torch.uint8)
    CopyProgram([Copy(source, target, Transfer(run_of(7, elements), run_of(1, elements)))]).run()
    assert torch.equal(target[1:-1], source[7:])
    assert target[0] == target[-1] == 0


def test_casts_equal_to() -> None:
    """A float32 source in a bfloat16 parameter holds what `.to` gives, values that overflow and NaN included."""
    source = torch.cat([torch.randn(1000), torch.tensor([3.4e38, float("nan"), 1e-45, -0.0])])
    target = torch.zeros(1004, dtype=torch.bfloat16)
    CopyProgram([Copy(source, target, Transfer(run_of(0, 1004), run_of(0, 1004)))]).run()
    assert torch.equal(target.view(torch.int16), source.to(torch.bfloat16).view(torch.int16))


def test_strided_sources_keep_their_order() -> None:
    """A transposed source fills a row-major target."""
    matrix = torch.arange(12, dtype=torch.int32).view(3, 4)
    target = torch.zeros(12, dtype=torch.int32)
    CopyProgram([Copy(matrix.reshape(-1), target, Transfer(Box(0, (4, 3), (1, 4)), Box(0, (4, 3), (3, 1))))]).run()
    assert torch.equal(target.view(4, 3), matrix.T)


def test_single_elements_are_copied() -> None:
    """A scalar is a box without dimensions."""
    target = torch.zeros(3, dtype=torch.bfloat16)
    CopyProgram([Copy(torch.ones(2, dtype=torch.bfloat16), target, Transfer(Box(1, (), ()), Box(2, (), ())))]).run()
    assert target.tolist() == [0, 0, 1]


def test_neighbours_are_merged() -> None:
    """Runs that follow each other on both sides cost one copy; the count of bytes stays."""
    source, target = torch.arange(10, dtype=torch.int16), torch.zeros(10, dtype=torch.int16)
    copies = [Copy(source, target, Transfer(run_of(at, 2), run_of(at, 2))) for at in (4, 0, 2, 8)]
    program = CopyProgram(copies)
    assert len(program._chunks) == 2
    assert program.size_bytes == 16
    program.run()
    assert target.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 8, 9]
