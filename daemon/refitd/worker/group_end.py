"""How a group of broadcasts ends: whatever is still being received is ended first.

A broadcast may be received straight into a parameter of the engine. Once its refit has failed the weights from before
are put back, and bytes that came after that would be served.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from refit_protocol.rendezvous import SOURCE_RANK, GroupBackend

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.001
_BRIEF = timedelta(milliseconds=1)
_NEVER_SENT_TAG = 1


class GroupEnd:
    """Lets go of a group's sockets and threads in the background, after `posted`, its broadcasts that are under way."""

    def __init__(self, backend: GroupBackend, held: list[Any], posted: Sequence[Any], device: torch.device) -> None:
        """The first of `held` is the process group; nothing else may hold them."""
        self._quiet = threading.Event()
        if not posted:
            self._quiet.set()
        arguments = backend, held, posted, device
        threading.Thread(target=self._run, args=arguments, name="refit-group-end", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether by then nothing is received any more."""
        return self._quiet.wait(seconds)

    def _run(self, backend: GroupBackend, held: list[Any], posted: Sequence[Any], device: torch.device) -> None:
        try:
            if backend == "nccl":
                _abort(held[0], posted, device)
            else:
                _close_connections(held[0], posted)
        # The boundary of the thread: whoever waits sees that it never became quiet.
        except Exception:
            logger.exception("the group could not be ended")
            return
        self._quiet.set()
        held.clear()


def _abort(group: Any, posted: Sequence[Any], device: torch.device) -> None:
    group.abort()
    if posted:
        # Their kernels, which have been told to end.
        torch.cuda.synchronize(device)


def _close_connections(group: Any, posted: Sequence[Any]) -> None:
    """gloo's `abort` leaves a posted receive to its timeout; but one that times out closes all of its connections."""
    while not all(work.is_completed() for work in posted):
        with contextlib.suppress(RuntimeError):  # which says that it timed out
            group.recv([torch.empty(1, dtype=torch.uint8)], SOURCE_RANK, _NEVER_SENT_TAG).wait(_BRIEF)
        time.sleep(_PAUSE_SECONDS)
