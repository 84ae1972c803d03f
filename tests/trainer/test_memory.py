"""Sealed memfds and parameters that were moved into one."""

from __future__ import annotations

import copy
import gc
import io
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_protocol.tensors import check_segments, check_source_tensors
from refit_trainer import NotShareable, share_parameters, unshare_parameters
from refit_trainer.memory import Memfd, MemfdBackend
from refit_trainer.sharing import shared_module


def read_as_daemon(segment: object, offset_bytes: int, size_bytes: int) -> bytes:
    """What another process reads through the descriptor's path."""
    with open(f"/proc/{segment.pid}/fd/{segment.fd}", "rb") as memory:
        memory.seek(offset_bytes)
        return memory.read(size_bytes)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def test_memfd_keeps_its_size() -> None:
    """A reader cannot be hit by SIGBUS: truncating or growing is refused to everybody."""
    memfd = Memfd("test", 4096)
    for size_bytes in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(memfd.segment.fd, size_bytes)


def test_memfd_is_described_as_it_is() -> None:
    """The path in the descriptor leads to the same inode, size and bytes."""
    memfd = Memfd("test", 4096)
    memfd.view[100:104] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    there = os.stat(f"/proc/{memfd.segment.pid}/fd/{memfd.segment.fd}")
    assert (there.st_ino, there.st_size) == (memfd.segment.inode, memfd.segment.size_bytes)
    assert read_as_daemon(memfd.segment, 100, 4) == bytes([1, 2, 3, 4])


def test_memfd_closes_its_descriptor_when_dropped() -> None:
    """No descriptor stays behind, whether the memory is closed or just forgotten; tensors in it stay valid."""
    # What earlier tests left behind counts neither way.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    memfd = Memfd("test", 4096)
    view = memfd.view[:4]
    del memfd
    view.fill_(7)
    assert view.tolist() == [7, 7, 7, 7]
    del view
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def tied_model() -> torch.nn.Module:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize(("weights", "says"), [({}, "a dict"), (torch.nn.Linear, "the class Linear"), (3, "a int")])
def test_what_has_no_parameters_to_share(weights: Any, says: str) -> None:
    for call in (share_parameters, unshare_parameters):
        with pytest.raises(TypeError, match=rf"{call.__name__}\(\) takes a torch.nn.Module, not {says}"):
            call(weights)


def test_sharing_keeps_parameters_and_their_values() -> None:
    """Parameter objects, ties and values are what they were."""
    model = tied_model()
    parameter, values = model["embed"].weight, model["embed"].weight.detach().clone()
    assert share_parameters(model) is model
    assert model["embed"].weight is parameter
    assert model["head"].weight is parameter
    assert torch.equal(parameter, values)


def test_tied_parameter_is_exported_once() -> None:
    """A tie lies in memory once and is described once."""
    shared = shared_module(share_parameters(tied_model()))
    assert [tensor.name for tensor in shared.tensors] == ["embed.weight"]
    assert shared.memory.segments[0].size_bytes < 2 * 5 * 3 * 4


def test_buffer_of_two_modules_is_moved_once_and_described_twice() -> None:
    """As a state dict has it: under both names, in one place, with its values."""
    model = torch.nn.ModuleDict({"one": torch.nn.Module(), "other": torch.nn.Module()})
    model["one"].weight = torch.nn.Parameter(torch.zeros(100))
    buffer = torch.arange(3.0)
    for child in model.values():
        child.register_buffer("scale", buffer)
    shared = shared_module(share_parameters(model))
    assert buffer.tolist() == [0, 1, 2]
    assert [tensor.name for tensor in shared.tensors] == ["one.weight", "one.scale", "other.scale"]
    assert shared.tensors[1].offset_bytes == shared.tensors[2].offset_bytes
    for described in shared.tensors[1:]:
        segment = shared.memory.segments[described.segment]
        assert read_as_daemon(segment, described.offset_bytes, described.size_bytes) == bits(buffer)


def test_optimiser_steps_are_seen_by_a_reader() -> None:
    """What a step in place writes is what the daemon reads, without another export."""
    model = torch.nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    shared = shared_module(share_parameters(model))
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimiser.step()
        for described in shared.tensors:
            parameter = model.get_parameter(described.name)
            segment = shared.memory.segments[described.segment]
            assert read_as_daemon(segment, described.offset_bytes, described.size_bytes) == bits(parameter)


def test_optimiser_state_made_before_sharing_goes_on() -> None:
    """Sharing in the middle of a training changes no step."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimisers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        if step == 1:
            share_parameters(models[1])
        for model, optimiser in zip(models, optimisers, strict=True):
            optimiser.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            optimiser.step()
    assert torch.equal(models[0].weight, models[1].weight)


def flat_model() -> tuple[torch.nn.Module, torch.Tensor]:
    """Two parameters cut from one buffer, which lives on if the caller keeps it."""
    flat = torch.arange(12.0)
    fused = flat.view(4, 3)
    model = torch.nn.Module()
    model.top, model.bottom = torch.nn.Parameter(fused[:2]), torch.nn.Parameter(fused[2:])
    return model, flat


def test_parameters_in_a_flat_buffer_of_somebody_else_stay_there() -> None:
    """What an optimiser writes through its buffer would not reach parameters that were moved out of it."""
    model, flat = flat_model()
    with pytest.raises(NotShareable, match="flat buffer of 48 bytes"):
        share_parameters(model)
    flat.add_(1)
    assert torch.equal(torch.cat([model.top, model.bottom]), flat.view(4, 3))
    del flat
    assert shared_module(share_parameters(model)) is not None


def test_part_of_a_flat_buffer_of_somebody_else_stays_there() -> None:
    """Padding, or parts that other modules have, do not hide that the buffer is not the parameter's own."""
    flat = torch.zeros(16)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(3))
    model.weight.data = flat[:3]
    with pytest.raises(NotShareable, match="flat buffer"):
        share_parameters(model)


def test_aliases_of_whole_parameters_do_not_hinder() -> None:
    """A state dict, and a graph that was not yet run backward, refer to a parameter's storage too."""
    model = torch.nn.Linear(3, 2)
    state, loss = model.state_dict(), model(torch.ones(1, 3)).sum()
    share_parameters(model)
    loss.backward()
    assert model.weight.grad is not None
    assert torch.equal(state["weight"], model.weight)


def test_module_inside_a_shared_one_can_be_shared_by_itself() -> None:
    """Memory that parameters were moved into is nobody else's buffer."""
    model = share_parameters(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)))
    part = share_parameters(model[0])
    assert shared_module(part) is not None
    with pytest.raises(NotShareable, match="share_parameters"):
        shared_module(model)
    assert shared_module(share_parameters(model)) is not None


def test_views_that_share_storage_go_on_sharing_it() -> None:
    """Two parameters cut from one buffer stay neighbours in the same memory."""
    model = share_parameters(flat_model()[0])
    assert model.top.untyped_storage().data_ptr() == model.bottom.untyped_storage().data_ptr()
    assert model.bottom.data_ptr() - model.top.data_ptr() == 2 * 3 * 4
    assert torch.equal(torch.cat([model.top, model.bottom]), torch.arange(12.0).reshape(4, 3))


def test_strides_are_kept_and_described() -> None:
    """A transposed parameter stays transposed, and a reader following the strides finds its values."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    shared = shared_module(share_parameters(model))
    assert shared.tensors[0].strides == (1, 3)
    segment = shared.memory.segments[0]
    assert read_as_daemon(segment, shared.tensors[0].offset_bytes, 24) == bits(torch.arange(6.0))


def test_odd_sizes_scalars_and_empty_tensors_are_valid_descriptors() -> None:
    """bf16[3] before fp32[2], a scalar and a tensor without elements all pass the daemon's own checks."""
    model = torch.nn.Module()
    model.odd = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    model.next = torch.nn.Parameter(torch.ones(2))
    model.scalar = torch.nn.Parameter(torch.tensor(5.0))
    model.empty = torch.nn.Parameter(torch.empty(0, 4))
    model.register_buffer("kept", torch.arange(3))
    model.register_buffer("scratch", torch.arange(3), persistent=False)
    shared = shared_module(share_parameters(model))
    assert [tensor.name for tensor in shared.tensors] == ["odd", "next", "scalar", "empty", "kept"]
    check_segments(shared.memory.segments)
    check_source_tensors(shared.tensors, shared.memory.segments)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(["bfloat16", "float32", "int8"])), max_size=8
    )
)
def test_any_set_of_tensors_is_moved_bit_for_bit(shapes: list[tuple[list[int], str]]) -> None:
    """Whatever the shapes and dtypes, values survive and no two tensors overlap."""
    tensors = [torch.randint(0, 100, shape).to(getattr(torch, dtype)) for shape, dtype in shapes]
    before = [tensor.clone() for tensor in tensors]
    MemfdBackend().share(tensors)
    for tensor in reversed(tensors):
        tensor.add_(0)
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.numel())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_sharing_twice_moves_nothing() -> None:
    """The export is made once."""
    model = share_parameters(torch.nn.Linear(3, 2))
    shared = shared_module(model)
    share_parameters(model)
    assert shared_module(model) is shared


@pytest.mark.parametrize(("change", "part"), [("data", r"0\.weight"), ("parameter", r"0\.weight"), ("child", "0")])
def test_moved_parts_are_noticed(change: str, part: str) -> None:
    """Weights that are no longer where they were exported are an error that names them, never a silent refit with old
    ones."""
    model = share_parameters(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    if change == "data":
        model[0].weight.data = model[0].weight.data.clone()
    elif change == "parameter":
        model[0].weight = torch.nn.Parameter(torch.zeros(2, 3))
    else:
        model[0] = torch.nn.Linear(3, 2)
    with pytest.raises(NotShareable, match=rf"^{part} was .*share_parameters"):
        shared_module(model)
    share_parameters(model)
    assert shared_module(model) is not None


def test_wrapped_module_is_the_module_itself() -> None:
    """torch.compile's wrapper adds a prefix that the engine does not know; the export is the bare module's."""
    model = share_parameters(torch.nn.Linear(3, 2))
    assert shared_module(torch.compile(model)) is shared_module(model)


def test_dropped_module_gives_its_memory_up() -> None:
    """Nothing keeps a shared model alive but its owner."""
    # What earlier tests left behind counts neither way.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        share_parameters(torch.nn.Linear(30, 20))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_dropped_module_whose_children_refer_back_gives_its_memory_up() -> None:
    """As the state of FSDP2 does, and hooks that are methods of the whole model."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        model = torch.nn.Sequential(torch.nn.Linear(30, 20))
        model[0].__dict__["whole"] = model
        share_parameters(model)
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def saved_and_loaded(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: torch.nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_copies_of_a_shared_module_are_not_shared(copied: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    """Their parameters lie elsewhere; they can be shared by themselves, and the first one stays as it is."""
    model = share_parameters(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    shared = shared_module(model)
    other = copied(model)
    assert shared_module(other) is None
    assert torch.equal(other[0].weight, model[0].weight)
    assert shared_module(share_parameters(other)) is not None
    assert shared_module(model) is shared


def test_a_module_made_of_a_shared_ones_attributes_is_not_shared() -> None:
    """As functional transformations make them: with other parameters, which a refit of the first one's would miss."""
    model = share_parameters(torch.nn.Linear(3, 2))
    shared, other = shared_module(model), copy.copy(model)
    other._parameters = {name: torch.nn.Parameter(torch.zeros_like(p)) for name, p in model._parameters.items()}
    assert shared_module(other) is None
    unshare_parameters(other)
    assert shared_module(model) is shared


def test_unshared_module_goes_on_working() -> None:
    """After unsharing nobody can open the memory any more, and the parameters are as they were."""
    model = share_parameters(torch.nn.Linear(3, 2))
    segment = shared_module(model).memory.segments[0]
    values = model.weight.detach().clone()
    unshare_parameters(model)
    assert shared_module(model) is None
    assert not Path(f"/proc/self/fd/{segment.fd}").exists()
    assert torch.equal(model.weight, values)


def test_unknown_dtype_is_refused() -> None:
    """A dtype that the wire does not have is named."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(NotShareable, match="complex64"):
        share_parameters(model)


def test_unknown_device_is_refused() -> None:
    """A device without a backend is named, with those that have one."""
    with pytest.raises(NotShareable, match=r"meta.*cpu"):
        share_parameters(torch.nn.Linear(3, 2, device="meta"))
