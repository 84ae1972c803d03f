"""`python -m scripts.benches NAME [--json FILE]`: measures, shows a table, writes JSON."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from rich.console import Console
from scripts.benches.figures import Figure, show, write_json

NAMES = ("refit", "parallel", "collective", "wire", "generate", "fleet", "scaling", "gpu")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    console = Console()
    figures: list[Figure] = []
    for figure in import_module(f"scripts.benches.{options.name}").measure():
        console.print(f"{figure.name}: {figure.value:,.3f} {figure.unit}")
        figures.append(figure)
    show(figures, console)
    if options.json is not None:
        write_json(figures, options.json)


if __name__ == "__main__":
    main()
