"""Findings as people read them and as programs do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from refitd.doctor.finding import Finding, Verdict, any_failed

STYLES = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red", Verdict.SKIP: "dim"}


def as_table(findings: Sequence[Finding]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.verdict, STYLES[finding.verdict]), finding.check, _text(finding))
    return table


def as_json(findings: Sequence[Finding]) -> str:
    """One object: `ok`, and the list of findings with check, verdict, found and advice."""
    content = {"ok": not any_failed(findings), "findings": [asdict(finding) for finding in findings]}
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def _text(finding: Finding) -> Text:
    text = Text(finding.found)
    return text.append(f"\n-> {finding.advice}", "cyan") if finding.advice else text
