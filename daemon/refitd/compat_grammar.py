"""Grammars that allow no text at all: vLLM takes them, has no token to choose from, and makes NaN of it.

xgrammar, vLLM's own reader of grammars, says with what a text may begin; with bytes for tokens it does so at once.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from refit_protocol.errors import ErrorCode, ProtocolError

if TYPE_CHECKING:
    from xgrammar import GrammarCompiler

# The time to compile one grows with the cube of its rules: a hundred take milliseconds, thousands a minute.
MAX_CHARACTERS = 4096
_BYTES = 256


def check_grammar(structured: Any) -> None:
    """Of vLLM's `StructuredOutputsParams`, or None. Raises `invalid_sampling`.

    Longer grammars, and those that xgrammar does not read, are left to vLLM.
    """
    grammar = None if structured is None else structured.grammar
    if not grammar or len(grammar) > MAX_CHARACTERS:
        return
    import xgrammar

    try:
        compiled = _compiler().compile_grammar(xgrammar.Grammar.from_ebnf(grammar))
    except RuntimeError:
        return
    allowed = xgrammar.allocate_token_bitmask(1, _BYTES + 1)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(allowed)
    if not allowed.any():
        raise ProtocolError(ErrorCode.INVALID_SAMPLING, "the grammar allows no text at all, not even an empty one")


@cache
def _compiler() -> GrammarCompiler:
    import xgrammar

    tokens = [bytes([byte]) for byte in range(_BYTES)]
    vocabulary = xgrammar.TokenizerInfo([*tokens, b"<end>"], stop_token_ids=[_BYTES])
    return xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
