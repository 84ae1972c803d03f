"""The door to vLLM: its input socket belongs to one thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

from refitd.compat import lock_input_socket


class Client:
    """Has the two methods of vLLM's client that send, one calling the other, and notes what overlapped."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def _send_input(self, kind: str, request: Any) -> Awaitable[None]:
        return self._send_input_message((kind, request), b"engine")

    def _send_input_message(self, message: Any, _engine: bytes) -> Awaitable[None]:
        self.sent.append(message)
        return asyncio.sleep(0)


def test_the_owner_sends_and_another_thread_is_named() -> None:
    """Two threads on that socket would interleave frames; the offender's name is in the error, nothing is sent."""
    client = Client()
    lock_input_socket(client)
    asyncio.run(client._send_input("add", 1))
    errors: list[str] = []

    def offend() -> None:
        try:
            client._send_input("add", 2)
        except AssertionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=offend, name="metrics-logger")
    thread.start()
    thread.join()
    assert client.sent == [("add", 1)]
    assert "metrics-logger" in errors[0]
