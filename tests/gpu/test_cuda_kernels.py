"""Copies, gathers, digests and comparisons on the device give exactly what plain tensor code gives."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("cupy", reason="needs CuPy, of the extra cuda12 or cuda13")

from refit_protocol.digest import LANES, MASK, element_weights, lane_weights, run_sum
from refitd.worker.boxes import Box, Transfer
from refitd.worker.copies import Copy, view_of
from refitd.worker.cuda_copies import DeviceCopies
from refitd.worker.cuda_digest import DeviceComparison, DeviceDigest
from refitd.worker.gather import gather
from refitd.worker.plan import Route

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.int8]


def bits(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    raw = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, device=device)
    return raw.view(dtype)


def run_box(offset: int, elements: int) -> Box:
    return Box(offset, (elements,), (1,))


def rows_box(offset: int, rows: int, columns: int, pitch: int) -> Box:
    return Box(offset, (rows, columns), (pitch, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_copies_move_exactly_their_elements(dtype: torch.dtype, seed: int, device: torch.device) -> None:
    """Runs aligned and odd, long and short, rows with other pitches on each side; everything else stays as it was."""
    choose = random.Random(seed)
    source, target = bits(3_000_000, dtype, device), bits(3_000_000, dtype, device)
    transfers, at = [], 0
    for _ in range(12):
        elements = choose.choice([1, 7, 64, 4096, 100_003, 262_144])
        shift = choose.choice([0, 0, 1, 3])
        transfers.append(
            Transfer(run_box(choose.randrange(1000) * 16 + shift, elements), run_box(at + shift, elements))
        )
        at += -(-(elements + shift) // 64) * 64
    transfers.append(Transfer(rows_box(64, 30, 2048, 4096), rows_box(at, 30, 2048, 2048 + 64)))
    transfers.append(Transfer(rows_box(64, 30, 33, 4096), rows_box(at + 200_000, 30, 33, 40)))
    expected = target.clone()
    for transfer in transfers:
        view_of(expected, transfer.target).copy_(view_of(source, transfer.source))
    program = DeviceCopies([Copy(source, target, transfer) for transfer in transfers])
    program.run()
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
    assert program.size_bytes == sum(transfer.elements for transfer in transfers) * dtype.itemsize


def test_copies_cast_between_dtypes(device: torch.device) -> None:
    """A float32 trainer and a bfloat16 engine: as `.to()` rounds."""
    source = torch.randn(1_000_000, device=device)
    target = torch.zeros(1_000_000, dtype=torch.bfloat16, device=device)
    DeviceCopies([Copy(source, target, Transfer(run_box(5, 900_000), run_box(8, 900_000)))]).run()
    assert torch.equal(target[8:900_008], source[5:900_005].to(torch.bfloat16))
    assert not target[900_008:].any()


def test_gather_reads_elements_of_every_width(device: torch.device) -> None:
    """Signed, in the order asked for."""
    elements = []
    for dtype in DTYPES:
        flat = bits(10_000, dtype, device)
        elements.append((flat, np.random.default_rng(0).integers(0, 10_000, 321)))
    found = gather(elements).bits().cpu()
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    expected = [flat.view(widths[flat.element_size()]).cpu()[torch.from_numpy(at)].long() for flat, at in elements]
    assert torch.equal(found, torch.cat(expected))


def reference_digest(route: Route, flat: torch.Tensor) -> int:
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    box = route.transfer.source
    index = np.full(box.sizes, box.offset, dtype=np.int64)
    for dimension, (size, stride) in enumerate(zip(box.sizes, box.strides, strict=True)):
        shape = [1] * len(box.sizes)
        shape[dimension] = size
        index = index + (np.arange(size, dtype=np.int64) * stride).reshape(shape)
    held = view_of(flat.view(widths[flat.element_size()]), route.transfer.target).cpu().numpy().astype(np.int64)
    with np.errstate(over="ignore"):
        return int((held.ravel() * element_weights(route.tensor, index.ravel())).sum()) & MASK


def read(digest: DeviceDigest) -> dict[str, int]:
    return {key: int(value) & MASK for key, value in digest.begin().items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_match_the_protocol(dtype: torch.dtype, device: torch.device) -> None:
    """Every group's sum is the protocol's, for aligned, odd and strided parts of tensors."""
    flat = bits(2_000_000, dtype, device)
    routes = {
        "whole": [Route("a", "p", Transfer(run_box(0, 300_000), run_box(0, 300_000)))],
        "odd": [
            Route("b", "p", Transfer(run_box(12_345, 200_001), run_box(300_001, 200_001))),
            Route("c", "p", Transfer(run_box(4096 * 5, 65_536), run_box(600_000, 65_536))),
        ],
        "rows": [Route("d", "p", Transfer(rows_box(2048, 40, 2048, 4096), rows_box(700_000, 40, 2048, 2048)))],
        "small": [Route("e", "p", Transfer(run_box(0, 1), run_box(1_999_999, 1)))],
    }
    groups = {key: [(route, flat) for route in found] for key, found in routes.items()}
    digest = DeviceDigest(groups, device)
    expected = {key: sum(reference_digest(route, flat) for route in found) & MASK for key, found in routes.items()}
    assert read(digest) == expected
    assert read(digest) == expected, "a second time too"
    flat[299_999:300_000].view(torch.uint8).bitwise_xor_(1)
    assert read(digest)["whole"] != expected["whole"]


def run_digest(route: Route, flat: torch.Tensor) -> int:
    """Of a run of elements of 2 bytes."""
    target = route.transfer.target
    held = flat.view(torch.int16)[target.offset : target.offset + target.elements].cpu().numpy().astype(np.int64)
    return run_sum(route.tensor, route.transfer.source.offset, held, lane_weights(), lambda array: array)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [0, 5 * LANES, 63 * LANES, 12_344, 12_345])
@pytest.mark.parametrize("shift", [0, 1])
def test_runs_of_every_length_match_the_protocol(
    dtype: torch.dtype, first: int, shift: int, device: torch.device
) -> None:
    """Whole blocks and parts of them, alone and in one group, at aligned and odd addresses, of all bit patterns."""
    lengths = [1, 4095, LANES, 3 * LANES, 16 * LANES, 17 * LANES + 5, 64 * LANES, 200 * LANES - 1]
    routes, at = [], shift
    for number, length in enumerate(lengths):
        routes.append(Route(f"t{number}", "p", Transfer(run_box(first, length), run_box(at, length))))
        at += -(-length // 8) * 8
    flat = bits(at, dtype, device)
    groups = {str(number): [(route, flat)] for number, route in enumerate(routes)}
    groups["together"] = [(route, flat) for route in routes]
    expected = {key: sum(run_digest(*one) for one in found) & MASK for key, found in groups.items()}
    assert read(DeviceDigest(groups, device)) == expected


@pytest.mark.parametrize("pattern", [0, 1, 0x00FF, 0x7F80, 0x7FFF, -0x8000, -0x80, -1])
def test_equal_elements_match_the_protocol(pattern: int, device: torch.device) -> None:
    """The largest and smallest sums: zeros of both signs, infinities, NaNs."""
    length = 64 * LANES
    flat = torch.full((length,), pattern, dtype=torch.int16, device=device).view(torch.bfloat16)
    route = Route("a", "p", Transfer(run_box(0, length), run_box(0, length)))
    assert read(DeviceDigest({"one": [(route, flat)]}, device)) == {"one": run_digest(route, flat)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_bit_names_its_tensor(dtype: torch.dtype, device: torch.device) -> None:
    """The comparison finds a flipped bit wherever it is, and no other tensor."""
    source, target = bits(1_000_000, dtype, device), bits(1_000_000, dtype, device)
    transfers = {
        "first": Transfer(run_box(0, 300_000), run_box(64, 300_000)),
        "odd": Transfer(run_box(300_001, 99_999), run_box(400_001, 99_999)),
        "rows": Transfer(rows_box(500_000, 20, 3000, 4096), rows_box(600_000, 20, 3000, 3000)),
    }
    copies = [(name, Copy(source, target, transfer)) for name, transfer in transfers.items()]
    DeviceCopies([copy for _, copy in copies]).run()
    comparison = DeviceComparison(copies, device)
    assert comparison.different() == []
    for name, at in (("first", 64 + 299_999), ("odd", 400_001), ("rows", 600_000 + 3000 * 19 + 2999)):
        target[at : at + 1].view(torch.uint8).bitwise_xor_(128)
        assert comparison.different() == [name]
        target[at : at + 1].view(torch.uint8).bitwise_xor_(128)
