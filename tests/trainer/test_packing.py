"""Tensors cut into bucket pieces and put together again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_protocol.broadcast import BroadcastLayout
from refit_protocol.tensors import ITEM_BYTES, BucketPiece, DType, TensorShape, check_pieces
from refit_trainer import LayoutMismatch
from refit_trainer.cuda_packing import CHUNK_BYTES, VECTOR_BYTES, chunks_of
from refit_trainer.layouts import MappingLayout, layout_of
from refit_trainer.packing import (
    ALIGNMENT_BYTES,
    CUT_BYTES,
    FilledBucket,
    Places,
    Placing,
    copy_range,
    fill_bytes,
    pack,
    pack_broadcasts,
)
from refit_trainer.packing_plan import PackingPlan, Run


def buckets_of(size_bytes: int) -> list[torch.Tensor]:
    return [torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2)]


def unpacked(tensors: dict[str, torch.Tensor], size_bytes: int, max_pieces: int = 1 << 16) -> dict[str, torch.Tensor]:
    """The tensors as a reader of the buckets finds them, each read before its bucket is written again."""
    layout, buckets = layout_of(tensors.items()), buckets_of(size_bytes)
    flat = {name: torch.empty(tensor.numel(), dtype=tensor.dtype) for name, tensor in tensors.items()}
    for filled in pack(iter(tensors.items()), layout, buckets, max_pieces):
        assert 0 < len(filled.pieces) <= max_pieces
        check_pieces(filled.pieces, layout, size_bytes)
        for piece in filled.pieces:
            item_bytes = ITEM_BYTES[layout[piece.name].dtype]
            memory = buckets[filled.bucket][piece.offset_bytes : piece.offset_bytes + piece.count * item_bytes]
            flat[piece.name][piece.first : piece.first + piece.count] = memory.view(flat[piece.name].dtype)
    return {name: values.reshape(tensors[name].shape) for name, values in flat.items()}


def awkward_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "odd": torch.randn(3).to(torch.bfloat16),
        "next": torch.randn(2),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(5.0),
        "wide": torch.randn(7, 50),
        "transposed": torch.randn(11, 13).t(),
        "sliced": torch.randn(6, 5, 9)[:, 1:4, ::2],
        "bytes": torch.randint(-100, 100, (65,), dtype=torch.int8),
        "flags": torch.rand(9) > 0.5,
    }


@pytest.mark.parametrize("size_bytes", [64, 128, 192, 256, 1024, 1 << 16])
def test_any_bucket_size_gives_the_same_tensors(size_bytes: int) -> None:
    """From buckets smaller than a row to larger than all tensors."""
    tensors = awkward_tensors()
    found = unpacked(tensors, size_bytes)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("difference", [-64, 0, 64])
def test_tensor_about_as_large_as_a_bucket(difference: int) -> None:
    """One alignment step smaller, equal, and larger."""
    tensors = {"before": torch.randn(3), "weight": torch.randn(1024 // 4), "after": torch.randn(3)}
    found = unpacked(tensors, 1024 + difference)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=30),
    st.integers(5 * CUT_BYTES, 30 * CUT_BYTES),
    st.integers(2, 4),
)
def test_buckets_are_filled_alike(shapes: list[tuple[int, int]], bucket_bytes: int, count: int) -> None:
    """Large ones: each but the last up to the same size, but for what is not cut; all of every tensor has a place."""
    layout = {str(n): TensorShape(name=str(n), dtype=DType.BFLOAT16, shape=shape) for n, shape in enumerate(shapes)}
    most_bytes = fill_bytes(layout.values(), bucket_bytes, count)
    placing = Placing(count, most_bytes, 1 << 16)
    filled = [placing.filled]
    pieces: dict[str, list[BucketPiece]] = defaultdict(list)
    for name, tensor in layout.items():
        for bucket, piece in placing.of(tensor):
            if bucket is not filled[-1]:
                filled.append(bucket)
            pieces[name].append(piece)
    for bucket in filled:
        check_pieces(bucket.pieces, layout, most_bytes)
    for name, tensor in layout.items():
        ends = [piece.first + piece.count for piece in pieces[name]]
        assert [piece.first for piece in pieces[name]] == [0, *ends[:-1]]
        assert ends[-1] == tensor.elements
    assert all(bucket.size_bytes > most_bytes - CUT_BYTES - ALIGNMENT_BYTES for bucket in filled[:-1])


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_last_bucket_has_its_share(count: int) -> None:
    """Of 100 tensors of 9 MiB, in buckets of 128: eight fillings would do, the last of them with next to nothing."""
    tensors = [TensorShape(name=str(n), dtype=DType.INT8, shape=(9, 1 << 20)) for n in range(100)]
    placing = Placing(count, fill_bytes(tensors, 128 << 20, count), 1 << 16)
    filled = [bucket for tensor in tensors for bucket, _ in placing.of(tensor)]
    sizes = [bucket.size_bytes for bucket in {id(bucket): bucket for bucket in filled}.values()]
    assert len(sizes) % count == 0
    assert sizes[-1] > 0.8 * max(sizes)


def test_number_of_pieces_is_limited() -> None:
    """A bucket is sent early rather than named by more pieces than the daemon takes."""
    tensors = {str(index): torch.randn(2) for index in range(10)}
    found = unpacked(tensors, 1 << 16, max_pieces=3)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6), st.integers(1, 20), st.randoms())
def test_packing_is_exact(shapes: list[list[int]], steps: int, random: object) -> None:
    """Whatever the shapes, strides and bucket size."""
    tensors = {}
    for index, shape in enumerate(shapes):
        order = list(range(len(shape)))
        random.shuffle(order)
        tensors[str(index)] = torch.randn(shape).permute(order)
    found = unpacked(tensors, 64 * steps)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@settings(max_examples=100)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_any_range_of_a_strided_tensor_is_copied(shape: list[int], data: st.DataObject) -> None:
    """The same elements as from a contiguous copy."""
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.randn(shape).permute(order)
    first = data.draw(st.integers(0, tensor.numel()))
    count = data.draw(st.integers(0, tensor.numel() - first))
    flat = torch.empty(count)
    copy_range(tensor, first, flat)
    assert torch.equal(flat, tensor.reshape(-1)[first : first + count])


def test_iterator_is_consumed_no_further_than_the_bucket() -> None:
    """A generator that gathers shards never holds more than it has to."""
    taken: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abcd":
            taken.append(name)
            yield name, torch.ones(16)

    announced = layout_of([(name, torch.ones(16)) for name in "abcd"])
    packed = pack(tensors(), announced, buckets_of(64), 10)
    next(packed)
    assert taken == ["a", "b"]


def test_parameters_are_packed_without_a_graph() -> None:
    """Copying a parameter that wants gradients leaves no autograd history in the buckets."""
    buckets = buckets_of(64)
    tensors = {"weight": torch.nn.Parameter(torch.ones(4))}
    list(pack(iter(tensors.items()), layout_of(tensors.items()), buckets, 10))
    assert not buckets[0].requires_grad


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("other", torch.ones(4), "other is not expected: pass specs="),
        ("first", torch.ones(4), "first comes a second time"),
        ("second", torch.ones(5), r"float32 \[5\], but float32 \[4\] is expected"),
        ("second", torch.ones(4, dtype=torch.float64), "float64"),
    ],
)
def test_what_is_not_expected_is_refused(name: str, tensor: torch.Tensor, says: str) -> None:
    """Unknown, repeated, or of another shape or dtype: said by name, with what to do."""
    announced = layout_of([("first", torch.ones(4)), ("second", torch.ones(4))])
    with pytest.raises(LayoutMismatch, match=says):
        list(pack(iter([("first", torch.ones(4)), (name, tensor)]), announced, buckets_of(1024), 10))


def test_missing_tensors_are_listed() -> None:
    """An iterator that ends too early is an error, not a smaller refit."""
    announced = layout_of([("first", torch.ones(4)), ("second", torch.ones(4))])
    with pytest.raises(LayoutMismatch, match="ended without second: pass specs=") as caught:
        list(pack(iter([("first", torch.ones(4))]), announced, buckets_of(1024), 10))
    assert caught.value.details == {"missing": ["second"]}


def test_broadcasts_take_the_next_buffer_only_where_something_is_packed() -> None:
    """Large contiguous tensors are sent from where they lie, so what is packed behind them finds the buffer that was
    used last but one; every byte is the tensors'."""
    wide = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    tensors = {
        "small": torch.ones(3),
        "beside": torch.ones(2),
        "large": torch.randn(64),
        "turned": wide.t(),
        "another": torch.randn(150),
        "tail": torch.full((2,), 7.0),
        "end": torch.full((1,), 8.0),
    }
    buffers = buckets_of(256)
    layout = BroadcastLayout(tuple(layout_of(tensors.items()).values()), 256)
    came: dict[str, list[torch.Tensor]] = {name: [] for name in tensors}
    used: list[int] = []
    packed = pack_broadcasts(iter(tensors.items()), layout, buffers)
    for broadcast, sent in zip(layout.broadcasts, packed, strict=True):
        inside = [sent.view.data_ptr() == buffer.data_ptr() for buffer in buffers]
        assert sent.in_buffer is any(inside)
        used += [inside.index(True)] if sent.in_buffer else []
        for piece in broadcast.pieces:
            view = sent.view[piece.offset_bytes : piece.offset_bytes + piece.count * 4]
            came[piece.name].append(view.view(torch.float32).clone())
    assert used == [0, 1, 0]
    assert all(torch.equal(torch.cat(came[name]), tensor.flatten()) for name, tensor in tensors.items())


# --- planned ---


def packed_by(filling: Iterator[FilledBucket], buckets: list[torch.Tensor]) -> list[tuple[FilledBucket, bytes]]:
    """What a reader is told of every bucket, and what it finds there."""
    return [(filled, buckets[filled.bucket].numpy().tobytes()) for filled in filling]


@pytest.mark.parametrize("size_bytes", [64, 192, 1024, 1 << 16])
@pytest.mark.parametrize("max_pieces", [3, 1 << 16])
def test_plan_packs_what_an_iterator_would(size_bytes: int, max_pieces: int) -> None:
    """The same pieces and the same bytes, refit after refit: of new values, and of tensors that have moved, turned from
    contiguous to strided, or are views at odd addresses."""
    tensors = awkward_tensors()
    layout, buckets, others = layout_of(tensors.items()), buckets_of(size_bytes), buckets_of(size_bytes)
    plan = PackingPlan([*layout.values()], Places(buckets), max_pieces)
    moved = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    turned = moved | {"wide": torch.randn(50, 7).t(), "bytes": torch.arange(67, dtype=torch.int8)[1:66]}
    for present in (tensors, {name: tensor + tensor for name, tensor in moved.items()}, turned, tensors):
        assert plan.is_for([*layout.values()], max_pieces)
        expected = packed_by(pack(iter(present.items()), layout, others, max_pieces), others)
        assert packed_by(plan.pack([*present.values()]), buckets) == expected


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6), st.integers(1, 20), st.randoms())
def test_any_plan_is_exact(shapes: list[list[int]], steps: int, random: object) -> None:
    """Whatever the shapes, strides and bucket size."""
    tensors = {}
    for index, shape in enumerate(shapes):
        order = list(range(len(shape)))
        random.shuffle(order)
        tensors[str(index)] = torch.randn(shape).permute(order)
    layout, buckets, others = layout_of(tensors.items()), buckets_of(64 * steps), buckets_of(64 * steps)
    plan = PackingPlan([*layout.values()], Places(buckets), 4)
    expected = packed_by(pack(iter(tensors.items()), layout, others, 4), others)
    assert packed_by(plan.pack([*tensors.values()]), buckets) == expected


def test_plan_is_for_one_layout_in_one_order() -> None:
    """Another order, dtype, shape or limit needs another plan."""
    tensors = {"a": torch.ones(4), "b": torch.ones(2, 3)}
    shapes = [*layout_of(tensors.items()).values()]
    plan = PackingPlan(shapes, Places(buckets_of(64)), 4)
    assert not plan.is_for(shapes[::-1], 4)
    assert not plan.is_for(shapes, 5)
    for other in (torch.ones(3, 2), torch.ones(6), torch.ones(2, 3, dtype=torch.float64)):
        assert not plan.is_for([*layout_of((tensors | {"b": other}).items()).values()], 4)


def test_planned_parameters_are_packed_without_a_graph() -> None:
    """Neither the contiguous nor the strided ones leave autograd history in the buckets."""
    buckets = buckets_of(256)
    tensors = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(3, 2).t())]
    shapes = layout_of([("plain", tensors[0]), ("turned", tensors[1])])
    list(PackingPlan([*shapes.values()], Places(buckets), 10).pack(tensors))
    assert not buckets[0].requires_grad
    assert torch.equal(buckets[0][:16].view(torch.float32), torch.ones(4))


def test_layout_of_a_mapping_follows_its_tensors() -> None:
    """The very same as long as names, shapes and dtypes stay; anew, and with the same refusals, where they do not."""
    known, tensors = MappingLayout(), {"a": torch.ones(4), "b": torch.ones(2, 3)}
    layout = known.of(tensors)
    assert layout == layout_of(tensors.items())
    assert known.of({name: tensor.clone() for name, tensor in tensors.items()}) is layout
    changes = [{"b": torch.ones(3, 2)}, {"b": torch.ones(2, 3, dtype=torch.int8)}, {"c": torch.ones(1)}]
    for changed in [tensors | change for change in changes] + [{"b": tensors["b"], "a": tensors["a"]}]:
        assert [*known.of(changed).items()] == [*layout_of(changed.items()).items()]
    with pytest.raises(TypeError, match="a pair of str and int"):
        known.of({"a": 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("size_bytes", [VECTOR_BYTES, CHUNK_BYTES, CHUNK_BYTES + VECTOR_BYTES, 5 * CHUNK_BYTES - 32])
def test_chunks_cover_every_run(size_bytes: int) -> None:
    """Each byte once, at the same distance from both starts, in chunks of bounded size."""
    runs = [Run(4, 32, 1 << 40, size_bytes), Run(0, 0, 1 << 41, 0), Run(2, 64, 1 << 42, 48)]
    chunks = chunks_of(runs)
    assert chunks.vectors.min() > 0
    assert chunks.vectors.max() <= CHUNK_BYTES // VECTOR_BYTES
    for run in runs:
        of_run = chunks.tensors == run.tensor
        sizes = chunks.vectors[of_run] * VECTOR_BYTES
        inside = np.cumsum(sizes) - sizes
        assert sizes.sum() == run.size_bytes
        assert np.array_equal(chunks.offsets[of_run], run.offset_bytes + inside)
        assert np.array_equal(chunks.targets[of_run], run.target + inside)
