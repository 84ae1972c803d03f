"""What a run looks like: a live table while it goes on, a picture of its curves afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from weekdays.verdict import GOAL_REWARD, LARGEST_LOGPROB_DIFFERENCE, StepRecord

BAR_CELLS = 10
# Lines around the rows: title, header, rules, prompt.
FRAME_LINES = 8


class RunTable:
    """Rows so far. Until `finished` only the latest, as many as fit the terminal."""

    def __init__(self, asked: str) -> None:
        self._asked = asked
        self._rows: list[tuple[str | Text, ...]] = []
        self.finished = False

    def add(self, record: StepRecord, example: str) -> None:
        """`example` is an answer to `asked` as text, whatever an untrained model may have said."""
        self._rows.append(
            (
                str(record.step),
                f"{record.reward:.3f} {_bar(record.reward)}",
                f"{record.logprob_abs_diff:.1e}",
                f"{record.refit_ms:.1f}",
                f"{record.tokens_per_second:,.0f}",
                str(record.version),
                Text("".join(character if character.isprintable() else "·" for character in example.strip())),
            )
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title="A trainer, refitting a running vLLM engine at every step", expand=True)
        table.add_column("step", justify="right")
        table.add_column("reward", style="green", no_wrap=True)
        table.add_column("|Δ logprob|", justify="right", style="cyan")
        table.add_column("refit ms", justify="right")
        table.add_column("tokens/s", justify="right")
        table.add_column("version", justify="right")
        table.add_column(f"after {self._asked} comes", no_wrap=True, ratio=1)
        for row in self._visible(console):
            table.add_row(*row)
        yield table

    def _visible(self, console: Console) -> Sequence[tuple[str | Text, ...]]:
        if self.finished:
            return self._rows
        return self._rows[-max(1, console.height - FRAME_LINES) :]


def _bar(share: float) -> str:
    return ("█" * round(share * BAR_CELLS)).ljust(BAR_CELLS, "·")


def save_picture(records: Sequence[StepRecord], path: Path) -> None:
    """Four curves over the steps, as a PNG."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    (reward, difference), (refit, rate) = figure.subplots(2, 2)
    figure.suptitle("refitd: a tiny Qwen3 learns the days of the week from reward alone")
    _curve(reward, records, lambda record: record.reward, "mean reward", "tab:green")
    reward.axhline(GOAL_REWARD, color="grey", linestyle=":", label=f"goal {GOAL_REWARD}")
    reward.set_ylim(0, 1.02)
    _curve(difference, records, lambda record: record.logprob_abs_diff, "mean |trainer - engine| logprob", "tab:blue")
    difference.axhline(LARGEST_LOGPROB_DIFFERENCE, color="tab:red", linestyle=":", label="largest allowed")
    difference.set_yscale("log", nonpositive="mask")
    difference.set_ylim(1e-10, 1)
    _curve(refit, records, lambda record: record.refit_ms, "refit, milliseconds", "tab:orange")
    refit.set_ylim(bottom=0)
    _curve(rate, records, lambda record: record.tokens_per_second, "generated tokens a second", "tab:purple")
    rate.set_ylim(bottom=0)
    reward.legend(loc="lower right")
    difference.legend(loc="center right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _curve(
    axes: Axes, records: Sequence[StepRecord], measure: Callable[[StepRecord], float], title: str, color: str
) -> None:
    axes.plot([record.step for record in records], [measure(record) for record in records], ".-", color=color)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
