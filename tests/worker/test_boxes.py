"""Box arithmetic against plain index lists."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from refitd.worker.boxes import Box, Transfer, clip_to_region, follow_strides, split_like


def indices(box: Box) -> list[int]:
    """The elements of a box in order."""
    return [
        box.offset + sum(index * stride for index, stride in zip(position, box.strides, strict=True))
        for position in itertools.product(*(range(size) for size in box.sizes))
    ]


def pairs(transfer: Transfer) -> set[tuple[int, int]]:
    return set(zip(indices(transfer.source), indices(transfer.target), strict=True))


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.Tensor]:
    """A shape, and a view into the row-major index tensor of that shape: narrowed, perhaps permuted."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    view = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    for dim, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        view = view.narrow(dim, start, draw(st.integers(1, size - start)))
    if draw(st.booleans()):
        view = view.permute(draw(st.permutations(range(view.dim()))))
    return shape, view


def transfer_of(view: torch.Tensor) -> Transfer:
    """Copies the view to a contiguous tensor."""
    target = torch.empty(view.shape)
    return Transfer(
        Box(view.storage_offset(), tuple(view.shape), view.stride()), Box(0, tuple(view.shape), target.stride())
    )


@given(slices())
def test_merging_keeps_every_pair(case: tuple[tuple[int, ...], torch.Tensor]) -> None:
    """Merged dimensions copy the same elements to the same places."""
    transfer = transfer_of(case[1])
    assert pairs(transfer.merged()) == pairs(transfer)


@given(slices(), st.data())
def test_clips_of_a_partition_are_the_whole(case: tuple[tuple[int, ...], torch.Tensor], data: st.DataObject) -> None:
    """However the source is cut into ranges, the clips together are the transfer, each element once."""
    transfer = transfer_of(case[1]).merged()
    elements = int(torch.tensor(case[0]).prod())
    cuts = sorted({0, elements, *data.draw(st.lists(st.integers(0, elements), max_size=6))})
    clips = [clip for first, end in itertools.pairwise(cuts) for clip in transfer.clipped(first, end)]
    assert transfer.can_clip
    assert sum(clip.elements for clip in clips) == transfer.elements
    assert set().union(*(pairs(clip) for clip in clips)) == pairs(transfer)


@given(slices(), st.data())
def test_boxes_follow_other_strides(case: tuple[tuple[int, ...], torch.Tensor], data: st.DataObject) -> None:
    """A box of row-major indices finds the same elements where the tensor lies with its dimensions in another order."""
    shape, view = case
    order = data.draw(st.permutations(range(len(shape))))
    stored = torch.arange(int(torch.tensor(shape).prod())).view(shape).permute(order).contiguous()
    tensor = stored.permute([order.index(dim) for dim in range(len(shape))])
    split = split_like(transfer_of(view).merged(), shape)
    box = follow_strides(split.source, shape, tensor.stride())
    assert box is not None
    values = stored.view(-1)[indices(box)].tolist()
    assert dict(zip(indices(split.target), values, strict=True)) == dict(enumerate(view.reshape(-1).tolist()))


def test_interleaved_boxes_cannot_be_clipped() -> None:
    """A box whose inner dimension reaches past the step of the outer one is no union of few ranges."""
    interleaved = Box(0, (3, 4), (1, 2))
    assert not Transfer(interleaved, interleaved).can_clip


def test_clipping_a_huge_run_does_not_walk_over_its_elements() -> None:
    """A vocabulary's worth of elements is cut as fast as a few: a walk over these would take hours."""
    elements = 1 << 40
    whole = Transfer(Box(0, (elements,), (1,)), Box(64, (elements,), (1,)))
    assert whole.clipped(10, elements - 5) == [
        Transfer(Box(10, (elements - 15,), (1,)), Box(74, (elements - 15,), (1,)))
    ]


@given(slices(), st.data())
def test_regions_that_make_up_a_tensor_take_a_copy_apart(
    case: tuple[tuple[int, ...], torch.Tensor], data: st.DataObject
) -> None:
    """Cut along any dimension into uneven parts, each part gives what lies in it, and together they are the copy."""
    shape, view = case
    transfer = transfer_of(view).merged()
    dimension = data.draw(st.integers(0, len(shape) - 1))
    inner = st.lists(st.integers(0, shape[dimension]), max_size=3)
    cuts = sorted([0, shape[dimension], *data.draw(inner)])
    every = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    found: list[tuple[int, int]] = []
    for first, end in itertools.pairwise(cuts):
        offsets = tuple(first if d == dimension else 0 for d in range(len(shape)))
        sizes = tuple(end - first if d == dimension else size for d, size in enumerate(shape))
        clipped = clip_to_region(transfer, shape, offsets, sizes)
        assert clipped is not None
        part = set(every.narrow(dimension, first, end - first).flatten().tolist())
        for clip in clipped:
            assert set(indices(clip.source)) <= part
            found += zip(indices(clip.source), indices(clip.target), strict=True)
    assert sorted(found) == sorted(pairs(transfer))


def test_a_copy_across_the_dimensions_is_not_taken_apart() -> None:
    """A diagonal, say, goes along no dimension of its tensor."""
    diagonal = Box(0, (4,), (5,))
    assert clip_to_region(Transfer(diagonal, Box(0, (4,), (1,))), (4, 4), (0, 0), (2, 4)) is None
