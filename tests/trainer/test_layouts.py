"""What a trainer may give to a refit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import Manifest, ManifestTensor
from refit_protocol.tensors import DType, TensorShape
from refit_trainer import LayoutMismatch, NotShareable, layouts
from refit_trainer.layouts import MappingLayout, announced, layout_of, named_pairs, predicted_layout


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([torch.ones(2)], "yields a Tensor"),
        ([1, 2], "yields a int"),
        (["ab"], "yields a str"),
        ([(torch.ones(1), "name")], "yields a pair of Tensor and str"),
        ([("name", [1.0])], "yields a pair of str and list"),
        ({"name": np.ones(1)}.items(), "yields a pair of str and ndarray"),
        (7, "no int"),
    ],
)
def test_what_are_no_pairs_of_names_and_tensors(given: Any, says: str) -> None:
    """A list of parameters, say: the error names what a refit takes, and what came instead."""
    with pytest.raises(TypeError, match=r"a refit takes a module, .* \(name, tensor\) pairs") as caught:
        list(named_pairs(given))
    assert says in str(caught.value)


@pytest.mark.parametrize("tensor", [torch.ones(2, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"])
def test_a_tensor_without_elements_is_refused_before_anything_is_packed(tensor: torch.Tensor) -> None:
    """As offloading leaves them; a refit that fails half-way leaves the engine torn."""
    with pytest.raises(NotShareable, match="last has no elements to copy"):
        MappingLayout().of({"first": torch.ones(2), "last": tensor})


def test_any_iterable_of_pairs_will_do() -> None:
    """A list as well as a generator, lists as well as tuples."""
    assert [name for name, _ in named_pairs([("a", torch.ones(1)), ["b", torch.ones(1)]])] == ["a", "b"]


def test_a_layout_whose_making_was_interrupted_is_no_other_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next refit would be packed by shapes that its tensors do not have."""
    small, large = {"a": torch.ones(1)}, {"a": torch.ones(2)}
    known = MappingLayout()
    known.of(small)
    looks: list[object] = []
    look = layouts._shapes

    def interrupted(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
        looks.append(tensors)
        if len(looks) == 2:
            raise InterruptedError
        return look(tensors)

    with monkeypatch.context() as interrupting:
        interrupting.setattr(layouts, "_shapes", interrupted)
        with pytest.raises(InterruptedError):
            known.of(large)
    assert known.of(small) == layout_of(small.items())


@pytest.mark.parametrize("dtype", ["float32", torch.float32, DType.FLOAT32])
@pytest.mark.parametrize("shape", [[260, 64], (260, 64), torch.Size([260, 64])])
def test_specs_may_be_written_as_people_write_them(dtype: Any, shape: Any) -> None:
    """A dtype by its name, a shape as a list: they mean the tensor that comes, and are sent as the wire has them."""
    layout = announced([TensorShape(name="a", dtype=dtype, shape=shape)])
    assert layout == layout_of([("a", torch.ones(260, 64))])
    assert type(layout["a"].dtype) is DType


@pytest.mark.parametrize(("dtype", "shape"), [("floa32", (2,)), ("float32", 2), ("float32", ("x",))])
def test_specs_that_say_no_dtype_or_shape_are_refused(dtype: Any, shape: Any) -> None:
    """At once and by name, before anything is sent."""
    with pytest.raises(TypeError, match=r"no dtype and shape of a\b"):
        announced([TensorShape(name="a", dtype=dtype, shape=shape)])


def test_of_the_specs_those_that_are_to_come_are_announced() -> None:
    """In their own order; a name that is not among them is refused with the daemon's code for it."""
    specs = layout_of((name, torch.ones(1)) for name in "abc").values()
    assert [*announced(iter(specs), only=["c", "a"])] == ["a", "c"]
    with pytest.raises(LayoutMismatch, match="d") as refused:
        announced(specs, only=["a", "d"])
    assert refused.value.code is ErrorCode.MANIFEST_MISMATCH


def test_specs_are_tensor_shapes() -> None:
    with pytest.raises(TypeError, match="no tuple"):
        announced([("a", (2,))])  # type: ignore[list-item]


def test_an_iterator_whose_names_have_a_prefix_is_told_so() -> None:
    """By its first tensor: before anything is sent."""
    needed = ManifestTensor(name="model.norm.weight", dtype=DType.FLOAT32, shape=(2,))
    with pytest.raises(LayoutMismatch, match=r"pass the module inside, model\.policy$"):
        predicted_layout(Manifest(tensors=[needed]), "policy.model.norm.weight", torch.ones(2))
