"""The asynchronous client: everything a daemon does, as coroutines and asynchronous iterators on one event loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, TypeVar, Unpack

from refit_protocol.endpoint import default_endpoint, socket_path
from refit_protocol.messages import (
    Fact,
    Generate,
    GetDigest,
    GetLoggerMetrics,
    GetManifest,
    GetStatus,
    InflightPolicy,
    LoadModel,
    LoggerMetrics,
    Manifest,
    ModelInfo,
    ModelLoaded,
    PlanMode,
    PrefixCacheReset,
    RefitReport,
    Request,
    ResetPrefixCache,
    Sampling,
    Sleep,
    SleepStateChanged,
    SleepTag,
    Status,
    WakeUp,
    WeightsDigest,
    WeightsRestored,
    Welcome,
)
from refit_trainer.connection import Connection, ConnectionOptions
from refit_trainer.errors import NotShareable
from refit_trainer.inbox import Mailbox
from refit_trainer.link import CurveKeys
from refit_trainer.prompts import GenerateOptions, Prompt, deadline_of, generate_command
from refit_trainer.refits import RefitOptions, Refits
from refit_trainer.replies import AsyncReplies, Item
from refit_trainer.stream import Delta, Sample, SampleAssembler

if TYPE_CHECKING:
    import torch

_Fact = TypeVar("_Fact", bound=Fact)

# Loading a model, waking up and draining before sleep move gigabytes or wait for generations.
SLOW_SECONDS = 600.0


class ConnectOptions(TypedDict, total=False):
    """`lease_seconds`: how long the daemon keeps a session that gives no sign of life. `plan`: for in-place sources."""

    client: str
    lease_seconds: float | None
    curve: CurveKeys | None
    plan: PlanMode | None


class AsyncDaemon:
    """A session with one daemon. Belongs to one event loop; made by `connect()`."""

    def __init__(self, connection: Connection, plan: PlanMode | None, timeout_seconds: float) -> None:
        self.connection = connection
        self._refits = Refits(connection, plan)
        self._timeout_seconds = timeout_seconds

    @classmethod
    def connect(
        cls, endpoint: str | None = None, timeout_seconds: float = 10.0, **options: Unpack[ConnectOptions]
    ) -> Connecting:
        """To be awaited, or entered by `async with`. Raises `DaemonUnreachable` after `timeout_seconds`.

        `endpoint` None is `$REFITD_ENDPOINT`, else the socket in this user's runtime directory. `timeout_seconds` also
        bounds every later call that has no bound of its own.
        """
        return Connecting(endpoint or default_endpoint(os.environ, os.getuid()), timeout_seconds, options)

    @property
    def welcome(self) -> Welcome:
        """What the daemon said when the present session was opened: its versions, limits and model."""
        return self.connection.welcome

    async def close(self) -> None:
        """Ends the session: its streams are cancelled, and its memory is no longer mapped by the daemon."""
        await self.connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- looking ---

    async def status(self) -> Status:
        return await self._ask(GetStatus(), Status)

    async def manifest(self) -> Manifest:
        return await self._ask(GetManifest(), Manifest)

    async def digest(self, mode: Literal["sampled", "full"] = "sampled") -> WeightsDigest:
        return await self._ask(GetDigest(mode=mode), WeightsDigest, SLOW_SECONDS)

    async def logger_metrics(self, clear: bool = False) -> LoggerMetrics:
        return await self._ask(GetLoggerMetrics(clear=clear), LoggerMetrics)

    # --- weights ---

    async def refit(self, weights: torch.nn.Module, **options: Unpack[RefitOptions]) -> RefitReport:
        """Makes the engine serve `weights`, and returns when every worker holds them."""
        from refit_trainer.sharing import shared_module

        shared = shared_module(weights)
        if shared is None:
            raise NotShareable("call share_parameters(model) first")
        return await self._refits.commit(shared, options)

    async def restore(self) -> WeightsRestored:
        """Puts back the last committed weights that the daemon kept."""
        return await self._refits.restore(timeout_seconds=SLOW_SECONDS)

    async def acquire_writer(self, *, takeover: bool = False) -> None:
        """Becomes the one session that may refit, as the first refit does by itself; `takeover` fences another off."""
        await self._refits.acquire_writer(takeover=takeover, timeout_seconds=self._timeout_seconds)

    async def release_writer(self) -> None:
        await self._refits.release_writer(timeout_seconds=self._timeout_seconds)

    # --- generation ---

    def generate(
        self, prompts: Iterable[Prompt], sampling: Sampling | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncReplies[Sample]:
        """Yields `len(prompts) * sampling.n` samples, each as soon as it is finished."""
        return self._replies(prompts, sampling, options, SampleAssembler().add)

    def stream(
        self, prompts: Iterable[Prompt], sampling: Sampling | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncReplies[Delta]:
        """Yields tokens as the engine makes them."""
        return self._replies(prompts, sampling, options, same)

    async def generate_one(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[GenerateOptions]
    ) -> Sample:
        """The first finished sample of one prompt; others that `sampling.n` asks for are cancelled."""
        async with self.generate([prompt], sampling, **options) as samples:
            return await anext(samples)

    async def cancel(self) -> list[int]:
        """Cancels every generation of this session; one alone is cancelled by its own `cancel()`."""
        return await self.connection.cancel(None, timeout_seconds=self._timeout_seconds)

    # --- the engine's life ---

    async def load_model(self) -> ModelInfo:
        """Starts the load that the daemon's configuration put off, and returns when the model can be served."""
        return (await self._ask(LoadModel(), ModelLoaded, SLOW_SECONDS)).model

    async def reset_prefix_cache(self) -> None:
        await self._ask(ResetPrefixCache(), PrefixCacheReset)

    async def sleep(self, level: Literal[1, 2] = 1, policy: InflightPolicy = "finish") -> SleepStateChanged:
        return await self._ask(Sleep(level=level, policy=policy), SleepStateChanged, SLOW_SECONDS)

    async def wake_up(self, tags: list[SleepTag] | None = None) -> SleepStateChanged:
        return await self._ask(WakeUp(tags=tags), SleepStateChanged, SLOW_SECONDS)

    async def send_generate(self, command: Generate, blobs: list[bytes], mailbox: Mailbox) -> int:
        """For iterators of other kinds than `AsyncReplies`: the id of the request whose replies go to `mailbox`."""
        return await self.connection.generate(command, blobs, mailbox, timeout_seconds=self._timeout_seconds)

    # --- inside ---

    async def _ask(self, command: Request, expected: type[_Fact], timeout_seconds: float | None = None) -> _Fact:
        return await self.connection.request(
            command, expected, timeout_seconds=timeout_seconds or self._timeout_seconds
        )

    def _replies(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | None,
        options: GenerateOptions,
        convert: Callable[[Delta], Item | None],
    ) -> AsyncReplies[Item]:
        command, blobs = generate_command(prompts, sampling, options)

        async def start(mailbox: Mailbox) -> int:
            return await self.send_generate(command, blobs, mailbox)

        return AsyncReplies(self.connection, start, convert, deadline_of(command))


class Connecting:
    """A session being opened: `await` it, or enter it by `async with`."""

    def __init__(self, endpoint: str, timeout_seconds: float, options: ConnectOptions) -> None:
        self._endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        self._options = options
        self._daemon: AsyncDaemon | None = None

    def __await__(self) -> Generator[Any, None, AsyncDaemon]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncDaemon:
        self._daemon = await self._open()
        return self._daemon

    async def __aexit__(self, *_: object) -> None:
        if self._daemon is not None:
            await self._daemon.close()

    async def _open(self) -> AsyncDaemon:
        socket_path(self._endpoint)
        connection = Connection(
            ConnectionOptions(
                endpoint=self._endpoint,
                client=self._options.get("client", "refit_trainer"),
                lease_seconds=self._options.get("lease_seconds"),
                curve=self._options.get("curve"),
            )
        )
        await connection.open(self._timeout_seconds)
        return AsyncDaemon(connection, self._options.get("plan"), self._timeout_seconds)


def same(delta: Delta) -> Delta:
    return delta
