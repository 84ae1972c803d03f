"""What `connect()` of the asynchronous clients gives: something to be awaited, or entered."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Protocol, TypeVar


class Closable(Protocol):
    async def close(self) -> None: ...


Client = TypeVar("Client", bound=Closable)


class Opening(Generic[Client]):
    """A client being opened: `await` it, or enter it by `async with`, which closes it in the end."""

    def __init__(self, open_client: Callable[[], Coroutine[Any, Any, Client]]) -> None:
        self._open = open_client
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._open().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._open()
        return self._client

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()
