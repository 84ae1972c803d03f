"""Why an engine process failed, told to the daemon: vLLM tells it only that one did.

The first process that logs what ended it leaves the exception's text in the runtime directory; those after it only say
that another one failed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

FAILURE_VARIABLE = "REFIT_ENGINE_FAILURE"
RECORD_NAME = "engine-failure"
# Errors of native code carry their whole stack.
MAX_CHARACTERS = 500


def prepare(environment: MutableMapping[str, str], runtime_directory: Path) -> None:
    """In the daemon, before it makes the engine: nothing has failed yet."""
    forget(runtime_directory)
    environment[FAILURE_VARIABLE] = str(runtime_directory / RECORD_NAME)


def read(runtime_directory: Path) -> str | None:
    """In the daemon: the reason in one line; None where no process has left one, as when it was killed."""
    try:
        return (runtime_directory / RECORD_NAME).read_text() or None
    except FileNotFoundError:
        return None


def forget(runtime_directory: Path) -> None:
    (runtime_directory / RECORD_NAME).unlink(missing_ok=True)


def one_line(error: BaseException) -> str:
    """Its kind and its whole text, unless that is very long."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."


class FailureHandler(logging.Handler):
    """What `vllm_logging.json` adds to the loggers of vLLM's main loops, which log the exceptions that end them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        path = os.environ.get(FAILURE_VARIABLE)
        if path is None or record.exc_info is None or record.exc_info[1] is None:
            return
        # Another process was first, or the directory is gone: the log has it in any case.
        with suppress(OSError), Path(path).open("x") as file:
            file.write(one_line(record.exc_info[1]))
