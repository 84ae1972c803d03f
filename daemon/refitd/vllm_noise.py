"""What vLLM warns of at every trace, load, refit and stop although all is well: one line instead of many, or none."""

from __future__ import annotations

import logging

# By the texts before their arguments, which vLLM's loggers leave in the records.
CAST = "Attempted to load weight %s with dtype %s into "
# Said of tied and computed layers, which no checkpoint has weights for; what is missing the manifest check names.
LEFT_ALONE = "%s: Failed to load weights"
# `Engine.stop` has it end them at once. vLLM has a line with their number, and one for each.
ENDED_AT_ONCE = "[shutdown] Process manager: force killing remaining process"


class VllmNoise(logging.Filter):
    """For the handlers of vLLM's processes; `debug` is the level that shows these lines as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._casts: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        if text.startswith(CAST):
            return self._first_of_its_kind(record)
        return text != LEFT_ALONE and not text.startswith(ENDED_AT_ONCE)

    def _first_of_its_kind(self, record: logging.LogRecord) -> bool:
        """Becomes the one line that says between which dtypes weights are cast."""
        _, brought, held = record.args or ("", "?", "?")
        cast = (str(brought), str(held))
        if cast in self._casts:
            return False
        self._casts.add(cast)
        record.msg, record.args = "weights are brought as %s and held as %s: they are cast in the copy", cast
        record.levelno, record.levelname = logging.INFO, "INFO"
        return True
