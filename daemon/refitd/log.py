"""The one place where logging is set up: JSON lines under the journal, readable lines in a terminal, always on stderr.

Everything logs through `structlog.get_logger()`; what libraries log through `logging` comes out in the same shape.
Ids of a request or refit are bound with `bind(...)` and then stand in every line of that task.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from enum import StrEnum
from pathlib import Path
from typing import Literal, TextIO

import structlog

from refitd.vllm_noise import VllmNoise

Level = Literal["debug", "info", "warning", "error"]


class Style(StrEnum):
    """How a line looks: for eyes, for programs, or for programs behind journald."""

    TEXT = "text"
    JSON = "json"
    JOURNAL = "journal"


# How vLLM's processes, which set up logging for themselves, are told to write as this daemon does. Not REFITD_*: these
# are no settings, and the configuration refuses what it does not know.
STYLE_VARIABLE = "REFIT_LOG_STYLE"
LEVEL_VARIABLE = "REFIT_LOG_LEVEL"
VLLM_CONFIGURATION = Path(__file__).with_name("vllm_logging.json")

# syslog(3) priorities: journald takes a leading `<N>` off a line and files it under that priority.
_PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}

bind = structlog.contextvars.bind_contextvars


def configure(level: Level = "info", json: bool | None = None, environment: Mapping[str, str] = os.environ) -> None:
    """Sends all logging of this process to stderr; `json` None chooses by whether stderr is the journal."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    style = choose_style(json, stderr_is_journal(environment, sys.stderr))
    logging.basicConfig(level=level.upper(), handlers=[_handler(style)], force=True)
    # Of our own, because what vLLM's HTTP app imports sets the root's to ERROR.
    logging.getLogger("refitd").setLevel(level.upper())


def export(environment: MutableMapping[str, str], vllm_level: str = "WARNING", json: bool | None = None) -> None:
    """Makes vLLM, in this process and in its children, log in the same way; call before vLLM is imported."""
    environment[STYLE_VARIABLE] = choose_style(json, stderr_is_journal(environment, sys.stderr))
    environment[LEVEL_VARIABLE] = vllm_level
    # Until vLLM has set up its own handler, which it does late, this process's handler gets its lines.
    logging.getLogger("vllm").setLevel(vllm_level)
    # An operator's own configuration of vLLM's logging wins.
    environment.setdefault("VLLM_LOGGING_CONFIG_PATH", str(VLLM_CONFIGURATION))


def exported_handler() -> logging.Handler:
    """What `vllm_logging.json` names: the handler that `export` described, made in a vLLM process."""
    handler = _handler(Style(os.environ.get(STYLE_VARIABLE, Style.TEXT)))
    handler.setLevel(os.environ.get(LEVEL_VARIABLE, "WARNING"))
    if handler.level > logging.DEBUG:
        handler.addFilter(VllmNoise())
    return handler


def choose_style(json: bool | None, journal: bool) -> Style:
    if json is None:
        json = journal
    if not json:
        return Style.TEXT
    return Style.JOURNAL if journal else Style.JSON


def stderr_is_journal(environment: Mapping[str, str], stream: TextIO) -> bool:
    """systemd names the device and inode of the stream it has connected: a terminal may have inherited the variable."""
    try:
        stat = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or replaced by something without a descriptor
        return False
    return environment.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}"


def _handler(style: Style) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(style))
    return handler


def _formatter(style: Style) -> structlog.stdlib.ProcessorFormatter:
    render = _text_processors() if style is Style.TEXT else _json_processors(prefix=style is Style.JOURNAL)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )


def _text_processors() -> list[structlog.typing.Processor]:
    colors = sys.stderr.isatty()
    return [
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
    ]


def _json_processors(*, prefix: bool) -> list[structlog.typing.Processor]:
    return [
        _add_process_id,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # A text, not structlog's nested form, which would put local variables (prompts, tensors) into the log.
        structlog.processors.format_exc_info,
        _priority_json if prefix else _render_json,
    ]


def _add_process_id(
    _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    event["pid"] = os.getpid()
    return event


_render_json = structlog.processors.JSONRenderer(default=str)


def _priority_json(logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict) -> str:
    priority = _PRIORITIES.get(event.get("level", "info"), _PRIORITIES["info"])
    return f"<{priority}>{_render_json(logger, method, event)!s}"
