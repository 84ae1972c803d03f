"""What a call to the workers fails with, where any of them refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from refit_protocol.errors import ErrorCode, ProtocolError


class WorkerError(ProtocolError):
    """What workers answered; `wrote` says that some engine memory may have changed."""

    def __init__(self, code: ErrorCode, message: str, *, wrote: bool, **details: object) -> None:
        super().__init__(code, message, **details)
        self.wrote = wrote


def raise_worker_error(answers: Sequence[Mapping[str, Any]], *, writes: bool) -> None:
    failures = [answer for answer in answers if "error" in answer]
    if not failures:
        return
    # A worker that succeeded in a writing call has written, even where another refused before its first byte.
    wrote = any(answer.get("wrote", False) for answer in failures) or (writes and len(failures) < len(answers))
    error = failures[0]["error"]
    details = {str(key): value for key, value in error.get("details", {}).items()}
    raise WorkerError(ErrorCode(error["code"]), error["message"], wrote=wrote, **details)
