"""What a benchmark says: one number, its unit, and whether it meets its target."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """`ratio` is to the reference measured in the same run; `target` in words, `met` None where there is none."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    target: str | None = None
    met: bool | None = None


def at_most(name: str, value: float, unit: str, limit: float, *, ratio: float | None = None) -> Figure:
    """Judged by its ratio where it has one, else by its value."""
    judged = value if ratio is None else ratio
    return Figure(name, value, unit, ratio, f"<= {limit:g}", judged <= limit)


def at_least(name: str, value: float, unit: str, limit: float, *, ratio: float | None = None) -> Figure:
    """Judged by its ratio where it has one, else by its value."""
    judged = value if ratio is None else ratio
    return Figure(name, value, unit, ratio, f">= {limit:g}", judged >= limit)


def show(figures: Iterable[Figure], console: Console) -> None:
    table = Table("figure", "value", "unit", "ratio", "target", "met")
    for figure in figures:
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3f}"
        met = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[figure.met]
        table.add_row(figure.name, f"{figure.value:,.3f}", figure.unit, ratio, figure.target or "", met)
    console.print(table)


def write_json(figures: Iterable[Figure], path: Path) -> None:
    path.write_text(json.dumps({"figures": [asdict(figure) for figure in figures]}, indent=1) + "\n")
