"""What the daemon tells systemd about itself: sd_notify(3) datagrams, or nothing where no `NOTIFY_SOCKET` is given."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import structlog

# A supervisor that does not read its socket must not hold the daemon up for longer than this.
SEND_TIMEOUT_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class Notifier:
    """One supervisor's notification socket; every method may be called from any thread.

    `watchdog_seconds` is how long systemd waits between two `watchdog()` calls, None where it does not watch us.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.watchdog_seconds = _watchdog_seconds(environment)
        self._address = _socket_address(environment.get("NOTIFY_SOCKET", ""))
        self._socket = None if self._address is None else _datagram_socket()

    @property
    def supervised(self) -> bool:
        return self._socket is not None

    def ready(self, status: str) -> None:
        """Start-up, or a reload, is complete."""
        self._send("READY=1", f"STATUS={_one_line(status)}", f"MAINPID={os.getpid()}")

    def status(self, text: str) -> None:
        """The line that `systemctl status` shows."""
        self._send(f"STATUS={_one_line(text)}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def extend(self, seconds: float) -> None:
        """Puts the time limit of the present start, reload or stop to `seconds` from now, if that is later."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def stopping(self, status: str = "stopping") -> None:
        self._send("STOPPING=1", f"STATUS={_one_line(status)}")

    def reloading(self) -> None:
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None or self._address is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            _log.warning("systemd was not notified", lines=lines, reason=str(error))


@contextmanager
def extending(notifier: Notifier, *, period_seconds: float, limit_seconds: float) -> Iterator[None]:
    """Keeps a long start or stop alive from a thread, since a model load blocks the event loop.

    Extensions end after `limit_seconds`, so that what hangs is still killed by the supervisor.
    """
    finished = threading.Event()
    arguments = (notifier, finished, period_seconds, limit_seconds)
    thread = threading.Thread(target=_extend_until, args=arguments, name="extend-timeout", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _extend_until(notifier: Notifier, finished: threading.Event, period_seconds: float, limit_seconds: float) -> None:
    end = time.monotonic() + limit_seconds
    while (left := end - time.monotonic()) > 0:
        # Twice the period, so that one late extension does no harm.
        notifier.extend(min(2 * period_seconds, left))
        if finished.wait(period_seconds):
            return


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    microseconds = environment.get("WATCHDOG_USEC", "")
    # WATCHDOG_PID names another process where the variables were merely inherited.
    meant_for = environment.get("WATCHDOG_PID") or str(os.getpid())
    if not microseconds.isdecimal() or int(microseconds) == 0 or meant_for != str(os.getpid()):
        return None
    return int(microseconds) / 1e6


def _socket_address(value: str) -> str | None:
    if value.startswith("/"):
        return value
    if value.startswith("@"):
        return "\0" + value[1:]
    if value:
        _log.warning("NOTIFY_SOCKET is of a kind this daemon does not speak", value=value)
    return None


def _datagram_socket() -> socket.socket:
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    datagrams.settimeout(SEND_TIMEOUT_SECONDS)
    return datagrams


def _one_line(text: str) -> str:
    return " ".join(text.split())
