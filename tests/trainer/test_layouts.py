"""What a trainer may give to a refit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from refit_trainer.layouts import named_pairs


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([torch.ones(2)], "yields a Tensor"),
        ([1, 2], "yields a int"),
        (["ab"], "yields a str"),
        ([(torch.ones(1), "name")], "yields a pair of Tensor and str"),
        ([("name", [1.0])], "yields a pair of str and list"),
        (7, "no int"),
    ],
)
def test_what_are_no_pairs_of_names_and_tensors(given: Any, says: str) -> None:
    """A list of parameters, say: the error names what a refit takes, and what came instead."""
    with pytest.raises(TypeError, match=r"a refit takes a module, .* \(name, tensor\) pairs") as caught:
        list(named_pairs(given))
    assert says in str(caught.value)


def test_any_iterable_of_pairs_will_do() -> None:
    """A list as well as a generator, lists as well as tuples."""
    assert [name for name, _ in named_pairs([("a", torch.ones(1)), ["b", torch.ones(1)]])] == ["a", "b"]
