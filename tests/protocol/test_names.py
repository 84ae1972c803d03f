"""Names that all have one word too many in front."""

from __future__ import annotations

import pytest

from refit_protocol.names import added_prefix, prefix_advice

MISSING = ["model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize("prefix", ["module.", "model.", "policy.pretrained_model."])
def test_a_common_prefix_is_found(prefix: str) -> None:
    """Of any depth, also one that names begin with anyhow; what else is given does not matter."""
    assert added_prefix(["v_head.weight", *(prefix + name for name in MISSING)], MISSING) == prefix


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ([], MISSING),
        (["stranger"], []),
        (["policy.model.norm.weight", "critic.lm_head.weight"], MISSING),
        (["xmodel.norm.weight", "xlm_head.weight"], MISSING),
    ],
)
def test_other_mistakes_are_none_of_a_prefix(given: list[str], missing: list[str]) -> None:
    """Nothing missing, a part behind another prefix, a letter too many."""
    assert added_prefix(given, missing) is None
    assert prefix_advice(None) == ""


def test_the_advice_is_an_expression() -> None:
    assert "model.policy.inner" in prefix_advice("policy.inner.")
