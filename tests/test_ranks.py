"""Several workers' answers as one."""

from __future__ import annotations

from typing import Any

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import UnplannedTensor
from refitd.ranks import combine_digests, combine_manifests, combine_paths, combine_unplanned


def tensor(name: str, dtype: str = "bfloat16", **fields: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": [2, 3], **fields}


def test_a_tensor_is_required_where_any_worker_needs_it() -> None:
    """Each pipeline stage calls the other's layers optional; its own dtype is the one that counts."""
    first = {"manifest": [tensor("a"), tensor("b", "bfloat16", optional=True), tensor("c", optional=True)]}
    second = {"manifest": [tensor("a", optional=True), tensor("b", "float32"), tensor("c", optional=True)]}
    combined = {each.name: each for each in combine_manifests([first, second])}
    assert [each.optional for each in combined.values()] == [False, False, True]
    assert combined["b"].dtype == "float32"


def test_reasons_are_listed_once() -> None:
    """Tensors that more than one worker loads without a plan."""
    answers = [{"loader_tensors": [{"name": name, "why": "packed"} for name in names]} for names in ("ab", "bc")]
    assert combine_unplanned(answers) == [UnplannedTensor(name=name, why="packed") for name in "abc"]


@pytest.mark.parametrize(
    ("paths", "combined"), [(["plan", "plan"], "plan"), (["plan", "loader"], "mixed"), (["mixed"], "mixed")]
)
def test_paths(paths: list[str], combined: str) -> None:
    """One word where all went one way."""
    assert combine_paths([{"path": path} for path in paths]) == combined


def test_replicas_that_differ_are_an_error() -> None:
    """Parts under one key are the same elements: they count once, and must agree."""
    agreeing = [{"digest": "x", "digest_parts": {"k": "01"}}, {"digest": "x", "digest_parts": {"k": "01", "l": "02"}}]
    assert combine_digests(agreeing) == f"{3:016x}"
    assert combine_digests([{"digest": None, "digest_parts": {}}]) is None
    with pytest.raises(ProtocolError) as refused:
        combine_digests([*agreeing, {"digest": "x", "digest_parts": {"l": "03"}}])
    assert refused.value.code is ErrorCode.ATTEST_FAILED
