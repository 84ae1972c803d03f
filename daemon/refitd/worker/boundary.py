"""What crosses to the daemon: message-pack natives, never an exception.

vLLM keeps the replies of a worker that raised queued, and every later call would answer for the one before.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any, Concatenate, ParamSpec, TypeAlias

from refit_protocol.errors import ErrorCode, ProtocolError

# Between two turns of a call that has waited for long.
PAUSE_SECONDS = 50e-6

logger = logging.getLogger(__name__)

# Calls come on vLLM's thread and on the line's.
_one_at_a_time = threading.RLock()

Answer = dict[str, Any]
Turns: TypeAlias = Generator[None, None, Answer]
"""A call that is waited for in turns with others: it yields while there is nothing to do, and returns its answer."""

P = ParamSpec("P")


def answered(method: Callable[Concatenate[Any, P], Answer]) -> Callable[Concatenate[Any, P], Answer]:
    """Returns `{"ok": True, ...}`, or `{"error": {code, message, details}, "wrote": bool}` whatever the method raises.

    `wrote` says whether any byte of the engine may have changed since the refit at hand began.
    """

    @functools.wraps(method)
    def answer(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Answer:
        try:
            with _one_at_a_time:
                return {"ok": True, **method(self, *args, **kwargs)}
        # The boundary of a call, whatever went wrong.
        except Exception as error:  # noqa: BLE001
            return _failed(self, method.__name__, error)

    return answer


def answered_in_turns(method: Callable[Concatenate[Any, P], Turns]) -> Callable[Concatenate[Any, P], Turns]:
    """The same for a call that takes turns."""

    @functools.wraps(method)
    def answer(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Turns:
        try:
            turns = method(self, *args, **kwargs)
            while True:
                with _one_at_a_time:
                    next(turns)
                yield
        except StopIteration as done:
            return {"ok": True, **done.value}
        # The boundary of a call, whatever went wrong.
        except Exception as error:  # noqa: BLE001
            return _failed(self, method.__name__, error)

    return answer


def to_the_end(turns: Turns) -> Answer:
    """For whoever has no other call to go on with."""
    while True:
        try:
            next(turns)
        except StopIteration as done:
            answer: Answer = done.value
            return answer
        time.sleep(PAUSE_SECONDS)


def _failed(worker: Any, name: str, error: Exception) -> Answer:
    if isinstance(error, ProtocolError):
        return _failure(worker, error.code, error.message, error.details)
    logger.error("%s failed", name, exc_info=error)
    code = ErrorCode.REFIT_FAILED if worker.refitd_wrote() else ErrorCode.INTERNAL
    message = f"{name.removeprefix('refitd_')} failed in the engine: {type(error).__name__}: {error}"
    return _failure(worker, code, message, {"traceback": "".join(traceback.format_exception(error))})


def _failure(worker: Any, code: ErrorCode, message: str, details: dict[str, Any]) -> Answer:
    return {"error": {"code": code.value, "message": message, "details": details}, "wrote": worker.refitd_wrote()}
