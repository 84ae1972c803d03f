"""Whether a prompt has the tokens that were asked for."""

from __future__ import annotations

import pytest

from refitd.http_call import HttpCall
from refitd.prefix import EarlierTokens, PrefixError


def call(earlier: EarlierTokens | None) -> HttpCall:
    return HttpCall(request=None, messages=[], earlier=earlier, min_version=None, wait_seconds=None, generates=True)


def test_earlier_tokens_that_were_not_put_in_are_an_error_not_forgotten() -> None:
    """As with gpt-oss, whose conversations vLLM writes without the chat template."""
    forgotten = call(EarlierTokens(turn=1, token_ids=[1, 2, 3]))
    with pytest.raises(PrefixError, match="without token ids"):
        forgotten.require_exact()
    forgotten.is_exact = True
    forgotten.require_exact()
    call(None).require_exact()
