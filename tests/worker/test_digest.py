"""One number for a set of weights, the same whoever computes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from refit_protocol.digest import (
    DigestMode,
    combine_parts,
    element_weights,
    lane_weights,
    run_sum,
    sampled_positions,
    to_hex,
)
from refit_protocol.errors import ProtocolError
from refit_protocol.tensors import DType
from refit_trainer import LayoutMismatch
from refit_trainer.digest import weights_digest
from refitd.worker.boxes import Box, Transfer
from refitd.worker.digest import bits_of, route_sum
from refitd.worker.plan import Route

NAME = "model.layers.0.self_attn.q_proj.weight"
VECTOR_WEIGHTS = [-6556659880784972351, 151002601933213391, -7972042683859432231]
VECTOR_POSITIONS = [9659, 22895, 30609, 78830]
VECTOR_DIGEST = "88a5a9c407499220"


@dataclass(frozen=True)
class Described:
    name: str
    dtype: DType
    optional: bool = False


def by_definition(name: str, values: torch.Tensor) -> int:
    """The sum, element by element in Python's own integers."""
    bits = bits_of(values.reshape(-1)).tolist()
    weights = element_weights(name, np.arange(len(bits), dtype=np.int64)).tolist()
    return sum(bit * weight for bit, weight in zip(bits, weights, strict=True))


def test_vectors() -> None:
    """Fixed numbers another implementation can check itself against."""
    values = torch.arange(-5, 5, dtype=torch.float32).to(torch.bfloat16)
    described = [Described(NAME, DType.BFLOAT16)]
    assert element_weights(NAME, np.array([0, 1, 4096], dtype=np.int64)).tolist() == VECTOR_WEIGHTS
    assert sampled_positions(NAME, 1 << 20)[:4].tolist() == VECTOR_POSITIONS
    assert weights_digest({NAME: values}, described, DigestMode.FULL) == VECTOR_DIGEST
    assert weights_digest({NAME: values.float().numpy()}, described, DigestMode.FULL) == VECTOR_DIGEST


@pytest.mark.parametrize("first", [0, 1, 4095, 4096, 5000])
@pytest.mark.parametrize("count", [0, 1, 4096, 9000])
def test_runs_sum_like_the_definition(first: int, count: int) -> None:
    """A run may start and end anywhere in a block."""
    values = torch.randn(first + count, dtype=torch.float32).to(torch.bfloat16)
    lanes = torch.from_numpy(lane_weights())
    part = run_sum(NAME, first, bits_of(values[first:]), lanes, torch.from_numpy)
    assert to_hex(part) == to_hex(by_definition(NAME, values) - by_definition(NAME, values[:first]))


@pytest.mark.parametrize("mode", DigestMode)
def test_trainer_counts_required_tensors_in_the_engines_dtype(mode: DigestMode) -> None:
    """A float32 master gives the digest of its bfloat16 cast; optional tensors (tied heads) do not count."""
    master = torch.randn(70, 90)
    described = [Described(NAME, DType.BFLOAT16), Described("lm_head.weight", DType.BFLOAT16, optional=True)]
    digest = weights_digest({NAME: master, "lm_head.weight": master}, described, mode)
    assert digest == weights_digest({NAME: master.to(torch.bfloat16)}, described, mode)
    changed = master.clone()
    changed[torch.unravel_index(torch.tensor(int(sampled_positions(NAME, 6300)[-1])), (70, 90))] += 1
    assert digest != weights_digest({NAME: changed}, described, mode)


def test_weights_that_lack_a_required_tensor_are_refused_by_its_name() -> None:
    """As those of another model: whether the engine serves them cannot be said."""
    described = [Described(NAME, DType.BFLOAT16), Described("model.norm.weight", DType.BFLOAT16)]
    with pytest.raises(LayoutMismatch, match=r"1 tensors .* not among these: model\.norm\.weight"):
        weights_digest({NAME: torch.ones(2)}, described)
    with pytest.raises(TypeError, match="a module or a mapping from names to tensors, no list"):
        weights_digest([(NAME, torch.ones(2))], described)  # type: ignore[arg-type]


def test_swapped_elements_and_names_show() -> None:
    """The same values in other places are other weights."""
    values = torch.randn(10000).to(torch.bfloat16)
    swapped = values.clone()
    swapped[0], swapped[8192] = values[8192], values[0]
    digests = {to_hex(by_definition(name, tensor)) for name, tensor in ((NAME, values), (NAME, swapped), ("b", values))}
    assert len(digests) == 3


def test_strided_routes_sum_like_the_definition() -> None:
    """Half the columns of a tensor, as a row-parallel rank holds them."""
    whole = torch.randn(64, 96).to(torch.bfloat16)
    zeroed = whole.clone()
    zeroed[:, :48] = 0
    held = whole[:, 48:].contiguous().view(-1)
    route = Route(NAME, "p", Transfer(Box(48, (64, 48), (96, 1)), Box(0, (64, 48), (48, 1))))
    assert to_hex(route_sum(route, held)) == to_hex(by_definition(NAME, zeroed))


def test_replicas_count_once_and_must_agree() -> None:
    """Parts under one key are the same elements on several ranks."""
    ranks = [{"norms": to_hex(5), "rank0": to_hex(7)}, {"norms": to_hex(5), "rank1": to_hex(-2)}]
    assert combine_parts(ranks) == to_hex(10)
    with pytest.raises(ProtocolError, match="disagree"):
        combine_parts([{"norms": to_hex(5)}, {"norms": to_hex(6)}])
