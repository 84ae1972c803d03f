"""How long an adapter's files stay."""

from __future__ import annotations

from contextlib import suppress

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.adapters import AdapterUses


def test_an_adapter_is_used_for_as_long_as_any_request_holds_it() -> None:
    """Also by a request that fails; the base model is no adapter."""
    uses = AdapterUses()
    uses.begin(3)
    with uses.held(None), uses.held(3):
        with suppress(RuntimeError), uses.held(3):
            raise RuntimeError
        assert not uses.is_unused(3)
    assert uses.is_unused(3)


def test_a_request_that_comes_too_late_is_refused() -> None:
    """Its files are gone: the engine would die of looking for them."""
    uses = AdapterUses()
    uses.begin(3)
    uses.end(3)
    with pytest.raises(ProtocolError) as refused, uses.held(3):
        pass
    assert refused.value.code is ErrorCode.UNKNOWN_ADAPTER
