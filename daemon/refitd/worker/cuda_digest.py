"""Digests and comparisons of whole parameters on a GPU, at the speed of its memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from refit_protocol.digest import LANES, lane_weights, name_salt
from refitd.worker.copies import Copy
from refitd.worker.cuda_kernels import THREADS, launch, multiprocessors
from refitd.worker.plan import Route
from refitd.worker.runs import runs_of

PIECE_ELEMENTS = 64 * LANES
_ROW = np.dtype(
    [("address", "u8"), ("other", "u8"), ("first", "u8"), ("salt", "u8"), ("elements", "u4"), ("group", "u4")]
)


@dataclass(frozen=True)
class _Run:
    """Consecutive elements at `address`; `other` is where the same bytes must be found, or 0."""

    address: int
    first: int
    elements: int
    other: int = 0


@dataclass(frozen=True)
class _Kernel:
    """Of `kernels.cu`; its registers and shared memory let so many of its blocks of threads run at once."""

    name: str
    blocks_per_multiprocessor: int


_KERNELS = {width: _Kernel(f"digest_{width}", 3) for width in (1, 2, 4, 8)}
_WHOLE_BLOCKS_2 = _Kernel("digest_2_blocks", 1)


class DeviceDigest:
    """The full digest of groups of routes. Tables are made once; a digest costs one pass over the bytes."""

    def __init__(self, groups: Mapping[str, Sequence[tuple[Route, torch.Tensor]]], device: torch.device) -> None:
        """Each route comes with the flat parameter it goes to."""
        self._keys = list(groups)
        self._device = device
        self._lanes = torch.from_numpy(lane_weights().copy()).to(device)
        rows: dict[int, list[NDArray[np.void]]] = defaultdict(list)
        for number, routes in enumerate(groups.values()):
            for route, flat in routes:
                width, salt = flat.element_size(), int(name_salt(route.tensor))
                rows[width] += [_rows(run, width, salt, number) for run in _route_runs(route, flat)]
        self._tables = [
            _Table(kernel, part, device)
            for width, found in rows.items()
            for kernel, part in _by_kernel(width, np.concatenate(found), device)
        ]

    def begin(self) -> dict[str, torch.Tensor]:
        """By group, modulo 2^64; enqueued."""
        with torch.cuda.device(self._device):
            sums = torch.zeros(len(self._keys), dtype=torch.int64, device=self._device)
            for table in self._tables:
                table.run(self._lanes, sums)
        return dict(zip(self._keys, sums, strict=True))


class DeviceComparison:
    """Compares both sides of copies between equal dtypes; tables are made once, a check is one pass over both sides."""

    def __init__(self, copies: Sequence[tuple[str, Copy]], device: torch.device) -> None:
        rows: dict[int, list[NDArray[np.void]]] = defaultdict(list)
        names: dict[int, list[str]] = defaultdict(list)
        for name, copy in copies:
            width = copy.target.element_size()
            found = [_rows(run, width, 0, 0) for run in _copy_runs(copy)]
            rows[width] += found
            names[width] += [name] * sum(len(table) for table in found)
        self._device = device
        self._lanes = torch.from_numpy(lane_weights().copy()).to(device)
        self._tables = [
            (np.array(names[width]), _Table(_KERNELS[width], np.concatenate(rows[width]), device)) for width in rows
        ]

    def different(self) -> list[str]:
        """The names of copies whose two sides hold different bytes."""
        sums = torch.zeros(1, dtype=torch.int64, device=self._device)
        with torch.cuda.device(self._device):
            for _, table in self._tables:
                table.run(self._lanes, sums)
            return sorted({name for names, table in self._tables for name in names[table.different()].tolist()})


class _Table:
    """Rows for one kernel, all with elements of its width."""

    def __init__(self, kernel: _Kernel, rows: NDArray[np.void], device: torch.device) -> None:
        self._kernel = kernel.name
        self._count = len(rows)
        self._rows = torch.from_numpy(rows.view(np.uint8)).to(device)
        self._different = torch.zeros(self._count, dtype=torch.uint8, device=device)
        self._compares = bool(rows["other"].any())
        self._blocks = min(multiprocessors(device) * kernel.blocks_per_multiprocessor, self._count)

    def run(self, lanes: torch.Tensor, sums: torch.Tensor) -> None:
        # Nobody else sets any, and the launch of a kernel that is cold takes 0.1 ms.
        if self._compares:
            self._different.zero_()
        launch(self._kernel, self._blocks, THREADS, self._rows, self._count, lanes, sums, self._different)

    def different(self) -> NDArray[np.bool_]:
        """Of each row, whether the bytes at `other` were not the same."""
        found: NDArray[np.bool_] = self._different.cpu().numpy().astype(np.bool_)
        return found


def _by_kernel(width: int, rows: NDArray[np.void], device: torch.device) -> Iterator[tuple[_Kernel, NDArray[np.void]]]:
    """For rows that are compared with nothing. First what takes longest: the next launch goes on meanwhile."""
    if width == 2 and torch.cuda.get_device_capability(device) >= (8, 0):
        whole = (rows["first"] % LANES == 0) & (rows["elements"] % LANES == 0) & (rows["address"] % 16 == 0)
        if whole.any():
            yield _WHOLE_BLOCKS_2, rows[whole]
        rows = rows[~whole]
    if len(rows):
        yield _KERNELS[width], rows


def _route_runs(route: Route, flat: torch.Tensor) -> list[_Run]:
    runs, width = runs_of(route.transfer), flat.element_size()
    return [
        _Run(flat.data_ptr() + target * width, first, runs.length)
        for first, target in zip(runs.sources.tolist(), runs.targets.tolist(), strict=True)
    ]


def _copy_runs(copy: Copy) -> list[_Run]:
    runs, width = runs_of(copy.transfer), copy.target.element_size()
    return [
        _Run(copy.target.data_ptr() + target * width, 0, runs.length, copy.source.data_ptr() + source * width)
        for source, target in zip(runs.sources.tolist(), runs.targets.tolist(), strict=True)
    ]


def _rows(run: _Run, width: int, salt: int, group: int) -> NDArray[np.void]:
    """The run cut at multiples of PIECE_ELEMENTS of the index, and between whole blocks and parts of one."""
    end = run.first + run.elements
    cuts = range(run.first // PIECE_ELEMENTS * PIECE_ELEMENTS, end, PIECE_ELEMENTS)
    wanted = {run.first, -(-run.first // LANES) * LANES, end // LANES * LANES, *cuts}
    firsts = np.array(sorted(cut for cut in wanted if run.first <= cut < end), dtype=np.int64)
    rows = np.zeros(len(firsts), dtype=_ROW)
    rows["address"] = run.address + (firsts - run.first) * width
    rows["other"] = run.other + (firsts - run.first) * width if run.other else 0
    rows["first"] = firsts
    rows["salt"] = salt
    rows["elements"] = np.diff(np.append(firsts, end))
    rows["group"] = group
    return rows
