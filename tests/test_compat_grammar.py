"""Grammars that allow nothing, and those that allow something."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.compat_grammar import MAX_CHARACTERS, check_grammar

pytest.importorskip("xgrammar")


def check(grammar: str | None) -> None:
    check_grammar(SimpleNamespace(grammar=grammar))


@pytest.mark.parametrize(
    "grammar", ["root ::= root", 'root ::= x "a"\nx ::= y\ny ::= x | root', 'root ::= "a"{0,0} x\nx ::= x']
)
def test_a_grammar_without_any_text_is_refused(grammar: str) -> None:
    """Each of its rules needs itself before its first character."""
    with pytest.raises(ProtocolError) as refused:
        check(grammar)
    assert refused.value.code is ErrorCode.INVALID_SAMPLING


@pytest.mark.parametrize(
    "grammar",
    [None, 'root ::= ""', 'root ::= root "a" | "b"', "root ::= [\\u4e00-\\u9fff]", "(((", 'start: A\nA: "a"'],
)
def test_others_are_let_through(grammar: str | None) -> None:
    """Those of another language, too, and what is none: that is for vLLM to judge."""
    check(grammar)


def test_what_would_take_long_to_look_at_is_not_looked_at() -> None:
    """Thousands of rules that need each other take a minute."""
    rules = "\n".join(f'x{n} ::= "a" | x{(n + 1) % 3000} "b" | ""' for n in range(3000))
    grammar = f"root ::= {' '.join(f'x{n}' for n in range(3000))}\n{rules}"
    assert len(grammar) > MAX_CHARACTERS
    check(grammar)
