"""What crosses to the daemon: message-pack natives, never an exception.

vLLM keeps the replies of a worker that raised queued, and every later call would answer for the one before.
"""

from __future__ import annotations

import functools
import logging
import threading
import traceback
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from refit_protocol.errors import ErrorCode, ProtocolError

logger = logging.getLogger(__name__)

# Calls come on vLLM's thread and on the line's.
_one_at_a_time = threading.RLock()

Answer = dict[str, Any]
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
        except ProtocolError as error:
            return _failure(self, error.code, error.message, error.details)
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            code = ErrorCode.REFIT_FAILED if self.refitd_wrote() else ErrorCode.INTERNAL
            message = f"{method.__name__.removeprefix('refitd_')} failed in the engine: {type(error).__name__}: {error}"
            return _failure(self, code, message, {"traceback": traceback.format_exc()})

    return answer


def _failure(worker: Any, code: ErrorCode, message: str, details: dict[str, Any]) -> Answer:
    return {"error": {"code": code.value, "message": message, "details": details}, "wrote": worker.refitd_wrote()}
