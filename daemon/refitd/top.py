"""What `refitd status` and `refitd top` show: pure functions from the daemon's replies to renderables and to JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from refit_protocol.messages import OpenPhase, RefitReport, RefitSummary, Status
from refit_protocol.states import EngineState

STATE_STYLES = {
    EngineState.READY: "bold green",
    EngineState.REFITTING: "bold cyan",
    EngineState.RESTORING: "bold cyan",
    EngineState.LOADING: "bold yellow",
    EngineState.UNLOADED: "yellow",
    EngineState.ASLEEP: "blue",
    EngineState.DRAINING: "yellow",
    EngineState.TORN: "bold red",
    EngineState.DEAD: "bold red",
}
OPEN_REFITS: dict[OpenPhase, str] = {
    "receiving": "more is to come of the trainer",
    "prepared": "prepared, the engine waits for the trainer's refit()",
    "held": "all is written, the trainer is to publish or abort it",
}
PHASES = ("validate", "gate", "copy", "attest", "publish")
BAR_WIDTH = 40


@dataclass(frozen=True)
class Moment:
    """One look at the daemon: `seconds` on a clock that only runs forward, `generated_tokens` since its start."""

    seconds: float
    status: Status
    generated_tokens: float | None = None


@dataclass(frozen=True)
class History:
    """What `top` remembers: its last two looks."""

    now: Moment | None = None
    before: Moment | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """None until two looks, in one life of the daemon, say how many there were."""
        if self.now is None or self.before is None or self.now.status.epoch != self.before.status.epoch:
            return None
        if self.now.generated_tokens is None or self.before.generated_tokens is None:
            return None
        seconds = self.now.seconds - self.before.seconds
        return (self.now.generated_tokens - self.before.generated_tokens) / seconds if seconds > 0 else None


def followed_by(history: History, moment: Moment) -> History:
    """The history after one more look."""
    return History(now=moment, before=history.now)


def status_json(status: Status) -> str:
    return msgspec.json.format(msgspec.json.encode(status), indent=2).decode()


def status_view(status: Status) -> RenderableType:
    """One look, for `refitd status`."""
    parts: list[RenderableType] = [_facts(status)]
    if status.state is EngineState.LOADING:
        parts.append(_load_bar(status))
    if status.last_refit is not None:
        parts.append(_refit_table([status.last_refit]))
    parts.extend(_trouble(status))
    return Group(*parts)


def top_view(history: History, endpoint: str) -> RenderableType:
    """The live view; before the first answer it says who is asked."""
    if history.now is None:
        keys = "; wrong CURVE keys look like this, too" if endpoint.startswith("tcp://") else ""
        return Panel(Text(f"waiting for a daemon at {endpoint}{keys}", "yellow"), title="refitd top")
    status = history.now.status
    parts: list[RenderableType] = [_facts(status), _rate(history.tokens_per_second)]
    if status.state is EngineState.LOADING:
        parts.append(_load_bar(status))
    if status.state in (EngineState.REFITTING, EngineState.RESTORING):
        parts.append(_bar(status.state.value, None))
    if status.recent_refits:
        parts.append(_refit_table(status.recent_refits))
    elif status.last_refit is not None:  # of a daemon that is older than this program
        parts.append(_refit_table([status.last_refit]))
    parts.extend(_trouble(status))
    return Panel(Group(*parts), title=f"refitd top: {endpoint}", title_align="left")


def _trouble(status: Status) -> Iterator[RenderableType]:
    """The last error with its time, in the operator's zone, and what to do about a state that needs it."""
    if status.last_error is not None:
        when = datetime.fromtimestamp(status.last_error.unix_seconds).astimezone()
        text = f"last error, {when:%Y-%m-%d %H:%M:%S}: {status.last_error.code}: {status.last_error.message}"
        yield Text(text, "red")
    if status.state is EngineState.TORN:
        yield Text("-> refitd reload, or let the trainer refit again", "cyan")


def _facts(status: Status) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    state = Text(_state_text(status), STATE_STYLES[status.state])
    rows: list[tuple[str, str | Text]] = [
        ("state", state),
        ("model", "not loaded" if status.model is None else status.model.name),
        ("weights", f"version {status.version}, digest {status.digest or 'none'} ({status.digest_mode})"),
        ("requests", f"{status.running_requests} running, {status.waiting_requests} waiting"),
        ("sessions", f"{status.sessions}, writer {status.writer or 'nobody'}"),
        ("daemon", _daemon_text(status)),
        ("devices", ", ".join(status.devices) or "none yet"),
    ]
    if status.http_url is not None:
        model = "" if status.model is None else f", model {status.model.name}"
        rows.append(("http", f"{status.http_url}{model}"))
    for name, value in rows:
        table.add_row(Text(name, "dim"), value)
    return table


def _state_text(status: Status) -> str:
    if status.open_refit is not None:
        return f"{status.state.value}: {OPEN_REFITS[status.open_refit]}"
    return f"{status.state.value}, a refit stands by" if status.stands_by else status.state.value


def _daemon_text(status: Status) -> str:
    vllm = f", vLLM {status.vllm_version}" if status.vllm_version else ""
    return f"{status.daemon_version}{vllm}, process {status.pid}, up {duration_text(status.uptime_seconds)}"


def _rate(tokens_per_second: float | None) -> RenderableType:
    rate = "unknown" if tokens_per_second is None else f"{tokens_per_second:,.0f}/s"
    return Text(f"tokens    {rate}")


def _load_bar(status: Status) -> RenderableType:
    """What comes before and after the weights takes as long as it takes."""
    counted = status.load_phase in (None, "loading weights")
    return _bar(status.load_phase or "loading", status.progress if counted else None)


def _bar(label: str, fraction: float | None) -> RenderableType:
    """A bar that pulses where nobody knows how far it is."""
    table = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=1.0, completed=fraction or 0.0, width=BAR_WIDTH, pulse=fraction is None)
    table.add_row(Text(label, "dim"), bar, "" if fraction is None else f"{fraction:.0%}")
    return table


def _refit_table(refits: Sequence[RefitReport | RefitSummary]) -> RenderableType:
    """Newest first. Fits into 80 columns, `top`'s frame included."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", title="refits, times in ms")
    table.title_justify = "left"
    for heading in ("version", "path", "size", "rate", "total", *PHASES):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in refits:
        table.add_row(*_refit_row(report))
    return table


def _refit_row(report: RefitReport | RefitSummary) -> list[str]:
    total = report.milliseconds.total
    return [
        str(report.version),
        report.path,
        size_text(report.size_bytes),
        size_text(report.size_bytes / (total / 1e3)) + "/s" if total > 0 else "-",
        milliseconds_text(total),
        *(milliseconds_text(getattr(report.milliseconds, phase)) for phase in PHASES),
    ]


def size_text(size_bytes: float) -> str:
    """Decimal units, as in rates: 16.4 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def milliseconds_text(milliseconds: float) -> str:
    """At most two decimals, and none where they would not be read: 8.03, 110, 1240."""
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def duration_text(seconds: float) -> str:
    minutes, _ = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"
