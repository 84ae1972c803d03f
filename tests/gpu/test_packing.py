"""Buckets on a GPU, filled by one kernel each, against the same tensors copied one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cupy", reason="needs CuPy, of the extra cuda12 or cuda13")

from refit_trainer.cuda_memory import plain_memory
from refit_trainer.cuda_packing import CHUNK_BYTES, has_kernel
from refit_trainer.layouts import layout_of
from refit_trainer.packing import FilledBucket, Places, pack
from refit_trainer.packing_plan import PackingPlan

BUCKETS, BUCKET_BYTES = 3, 1 << 20


def buckets_on(device: torch.device) -> list[torch.Tensor]:
    """Zeroed, since what lies between two pieces is compared as well."""
    buckets = [plain_memory(BUCKET_BYTES, device) for _ in range(BUCKETS)]
    for bucket in buckets:
        bucket.zero_()
    return buckets


def mixed_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    whole = torch.randn(5000, device=device, dtype=torch.bfloat16)
    return {
        "plain": torch.randn(300, 70, device=device),
        "odd": torch.randn(7, device=device, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.randn(64, 64, device=device)),
        "empty": torch.empty(0, 3, device=device),
        "scalar": torch.tensor(3.0, device=device),
        "larger than a bucket": torch.randn(1000, 1003, device=device),
        "chunks and a bit": torch.randint(-100, 100, (2 * CHUNK_BYTES + 16,), device=device, dtype=torch.int8),
        "between vectors": whole[1:4001],
        "turned": torch.randn(130, 90, device=device).t(),
        "every other": torch.randn(64, 256, device=device)[:, ::2],
        "elsewhere": torch.randn(128),
        "turned and larger": torch.randn(700, 800, device=device).t(),
        "last": torch.randn(4096, device=device, dtype=torch.float16),
    }


def came(filling: Iterator[FilledBucket], buckets: list[torch.Tensor]) -> list[tuple[FilledBucket, bytes]]:
    """What a reader is told of every bucket, and what it finds there."""
    return [(filled, buckets[filled.bucket].cpu().numpy().tobytes()) for filled in filling]


class Twin:
    """A plan, and buckets beside its own that are filled without one."""

    def __init__(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        assert has_kernel(device)
        self.layout = layout_of(tensors.items())
        self.buckets, self.others = buckets_on(device), buckets_on(device)
        self.plan = PackingPlan([*self.layout.values()], Places(self.buckets), 1 << 16)

    def compare(self, tensors: dict[str, torch.Tensor]) -> None:
        expected = came(pack(iter(tensors.items()), self.layout, self.others, 1 << 16), self.others)
        assert came(self.plan.pack([*tensors.values()]), self.buckets) == expected


def test_every_byte_is_that_of_a_copy(device: torch.device) -> None:
    """Of contiguous tensors, strided ones, odd sizes and addresses, parts of a tensor, and one in host memory; at every
    refit, with the values that there are then."""
    tensors = mixed_tensors(device)
    twin = Twin(tensors, device)
    for _ in range(3):
        twin.compare(tensors)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.add_(1)


def test_tensors_that_moved_are_read_where_they_are(device: torch.device) -> None:
    """Also to an address between two vectors, from one, and where a contiguous tensor is now a strided one."""
    tensors = mixed_tensors(device)
    twin = Twin(tensors, device)
    twin.compare(tensors)
    moved = {name: tensor.detach() * 2 for name, tensor in tensors.items()}
    shifted = torch.randn(300 * 70 + 1, device=device)[1:].view(300, 70)
    turned = torch.randn(64, 64, device=device).t()
    for present in (moved, moved | {"plain": shifted}, moved | {"parameter": turned}, moved, tensors):
        twin.compare(present)


def test_values_that_are_still_being_computed_are_waited_for(device: torch.device) -> None:
    """The kernel goes on the caller's own stream, behind what computes the weights."""
    tensors = mixed_tensors(device)
    twin = Twin(tensors, device)
    twin.compare(tensors)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.mul_(3)
        planned = came(twin.plan.pack([*tensors.values()]), twin.buckets)
    torch.cuda.synchronize(device)
    assert planned == came(pack(iter(tensors.items()), twin.layout, twin.others, 1 << 16), twin.others)


def test_a_tensor_that_computes_its_values_is_asked_for_them(device: torch.device) -> None:
    """What lies at the address of such a subclass, if anything does, is not what it stands for."""

    class Doubled(torch.Tensor):
        half: torch.Tensor

        @staticmethod
        def __new__(cls, half: torch.Tensor) -> Doubled:
            made: Doubled = torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype, device=half.device)
            made.half = half
            return made

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.detach.default:
                return cls(args[0].half)
            plain = [arg.half * 2 if isinstance(arg, cls) else arg for arg in args]
            return function(*plain, **(kwargs or {}))

    values = torch.randn(64, 64, device=device)
    tensors = {"plain": values, "doubled": Doubled(values)}
    twin = Twin(tensors, device)
    filled = list(twin.plan.pack([*tensors.values()]))
    torch.cuda.synchronize(device)
    piece = filled[0].pieces[1]
    found = twin.buckets[0][piece.offset_bytes : piece.offset_bytes + values.nbytes].view(torch.float32).view(64, 64)
    assert torch.equal(found, values * 2)
