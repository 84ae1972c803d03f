"""What vLLM's loaders warn of at every trace, load and refit although all is well: one line instead of many."""

from __future__ import annotations

import logging

# By the texts before their arguments, which vLLM's loggers leave in the records.
CAST = "Attempted to load weight %s with dtype %s into "
# Said of tied and computed layers, which no checkpoint has weights for; what is missing the manifest check names.
LEFT_ALONE = "%s: Failed to load weights"


class LoaderNoise(logging.Filter):
    """For the handlers of vLLM's processes; `debug` is the level that shows these lines as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._casts: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        if text.startswith(CAST):
            return self._first_of_its_kind(record)
        return text != LEFT_ALONE

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
