"""The asynchronous client: everything a daemon does, as coroutines and asynchronous iterators on one event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, Self, TypedDict, TypeVar, Unpack

from refit_protocol.awake import awake
from refit_protocol.digest import DigestMode
from refit_protocol.endpoint import default_endpoint, socket_path
from refit_protocol.errors import ErrorCode, Fault
from refit_protocol.messages import (
    AdapterLoaded,
    AdapterUnloaded,
    CollectiveJoined,
    Fact,
    Generate,
    GetDigest,
    GetLoggerMetrics,
    GetManifest,
    GetStatus,
    InflightPolicy,
    LoadAdapter,
    LoadModel,
    LoggerMetrics,
    Manifest,
    ModelInfo,
    ModelLoaded,
    PlanMode,
    PrefixCacheReset,
    Request,
    ResetPrefixCache,
    Sampling,
    Sleep,
    SleepStateChanged,
    SleepTag,
    Status,
    UnloadAdapter,
    WakeUp,
    WeightsDigest,
    WeightsRestored,
    Welcome,
)
from refit_protocol.states import NOT_SERVABLE, EngineState
from refit_trainer.broadcast_refits import join_group, refit_by_broadcast
from refit_trainer.connection import Connection, ConnectionOptions
from refit_trainer.daemon_refit import AWAKE_SECONDS, DaemonRefit, refit_in_place
from refit_trainer.errors import RefitdError, RequestTimedOut
from refit_trainer.inbox import Mailbox
from refit_trainer.link import CurveKeys
from refit_trainer.opening import Opening
from refit_trainer.options import Count, Patience, Seconds, check_options, checked
from refit_trainer.prepared import AsyncPreparedRefit, Preparation, Terms, prepare_steps, refused_beside, take
from refit_trainer.prompts import GenerateOptions, Prompt, generate_command, reading_of
from refit_trainer.refits import CommitOptions, PrepareOptions, RefitOptions, reload, restore, split_options
from refit_trainer.replies import AsyncReplies, Item
from refit_trainer.report import RefitReport
from refit_trainer.steps import Steps, walk
from refit_trainer.stream import Delta, Sample, SampleAssembler
from refit_trainer.writer import WriterRole

if TYPE_CHECKING:
    import torch

    from refit_protocol.tensors import TensorShape
    from refit_trainer.collective import AsyncCollective, Broadcaster, CollectiveOptions
    from refit_trainer.ranks import RankedRefits
    from refit_trainer.staging import Staging, Weights

_Fact = TypeVar("_Fact", bound=Fact)

# Loading a model, waking up and draining before sleep move gigabytes or wait for generations.
SLOW_SECONDS = 600.0
_LOOK_AGAIN_SECONDS = 0.2


class ConnectOptions(TypedDict, total=False):
    """`lease_seconds`: how long the daemon keeps a session that gives no sign of life. `plan`: for in-place sources.

    `request_seconds` bounds later calls that have no bound of their own, by default as `connect` is bounded.
    `patience_seconds`: how long streams and calls wait for a lost connection; by default streams as long as the daemon
    keeps the session, and calls to their own bound.
    `stand_by`: whenever the engine has nothing to do, the daemon has the next refit in place ready but for its copy.
    `bucket_bytes`, by default 64 MiB and on a GPU 512, is half of the memory of the staging buckets: two, on a GPU
    four, and no larger than all tensors need.
    """

    client: str
    lease_seconds: Seconds | None
    request_seconds: Seconds
    patience_seconds: Patience | None
    curve: CurveKeys | None
    plan: PlanMode | None
    bucket_bytes: Count
    stand_by: bool


class _ConnectArguments(ConnectOptions, total=False):
    endpoint: str | None
    timeout_seconds: Seconds


class AsyncDaemon:
    """A session with one daemon. Belongs to one event loop; made by `connect()`."""

    def __init__(self, connection: Connection, timeout_seconds: float, options: ConnectOptions) -> None:
        self.connection = connection
        self._plan = options.get("plan")
        self._role = WriterRole(connection, self._plan, stand_by=options.get("stand_by", False))
        self._ranks: RankedRefits | None = None
        self._bucket_bytes = options.get("bucket_bytes")
        self._staging: Staging | None = None
        self._timeout_seconds = timeout_seconds
        self._engine_devices: list[str] = []
        self._prepared: set[AsyncPreparedRefit] = set()

    @classmethod
    def connect(
        cls, endpoint: str | None = None, timeout_seconds: float = 10.0, **options: Unpack[ConnectOptions]
    ) -> Opening[AsyncDaemon]:
        """To be awaited, or entered by `async with`. Raises `DaemonUnreachable` after `timeout_seconds`.

        `endpoint` None is `$REFITD_ENDPOINT`, else the socket in this user's runtime directory. `timeout_seconds` also
        bounds every later call that has no bound of its own.
        """
        said = {"endpoint": endpoint, "timeout_seconds": timeout_seconds, **options}
        check_options("connect", said, _ConnectArguments)
        where = endpoint or default_endpoint(os.environ, os.getuid())
        return Opening(lambda: _open(where, timeout_seconds, options))

    @property
    def welcome(self) -> Welcome:
        """What the daemon said when the present session was opened: its versions, limits and model."""
        return self.connection.welcome

    async def close(self) -> None:
        """Ends the session: its streams are cancelled, and its memory is no longer mapped by the daemon."""
        self._prepared.clear()
        await self.connection.close()
        self._role.close()
        if self._staging is not None:
            self._staging.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- looking ---

    async def status(self) -> Status:
        return await self._ask(GetStatus(), Status)

    async def wait_until_ready(self, timeout_seconds: float = SLOW_SECONDS) -> Status:
        """Returns when the engine serves, as it does some time after the daemon has begun to answer; or when it is
        `torn`, since a trainer was killed in the middle of a refit: the next full one mends that.

        Raises `RequestTimedOut`, or `RefitdError` with the reason why the engine did not start or died.
        """
        give_up_at = time.monotonic() + timeout_seconds
        while (status := await self.status()).state not in (EngineState.READY, EngineState.TORN):
            if status.state is EngineState.DEAD:
                raise _why_dead(status)
            if time.monotonic() > give_up_at:
                raise RequestTimedOut(f"after {timeout_seconds:g} s {_why_not_ready(status.state)}")
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        return status

    async def openai_base_url(self) -> str:
        """What an OpenAI client takes as `base_url`; `status().model.name` is its `model`.

        Raises `RefitdError` (`unsupported`) where the daemon serves no such endpoint: a client given None instead would
        send its prompts to OpenAI.
        """
        url = (await self.status()).http_url
        if url is None:
            raise RefitdError(
                "the daemon serves no OpenAI endpoint: start it with http.enabled = true", code=ErrorCode.UNSUPPORTED
            )
        return url

    async def manifest(self) -> Manifest:
        return await self._ask(GetManifest(), Manifest)

    async def digest(self, mode: Literal["sampled", "full"] = "sampled") -> WeightsDigest:
        command = checked(GetDigest(mode=mode))
        # Where an engine runs does not change: asked for once.
        if not self._engine_devices:
            self._engine_devices = (await self.status()).devices
        with awake(AWAKE_SECONDS.get("cpu" if "cpu" in self._engine_devices else "cuda", 0.0)):
            return await self._ask(command, WeightsDigest, SLOW_SECONDS)

    async def verify(self, weights: torch.nn.Module | Mapping[str, torch.Tensor], *, full: bool = False) -> bool:
        """Whether the engine serves exactly these weights, by the digests of both; `full` looks at every element.

        Raises `LayoutMismatch` where one is missing that the engine needs.
        """
        return await walk(self.verify_steps(weights, full=full))

    async def logger_metrics(self, clear: bool = False) -> LoggerMetrics:
        return await self._ask(checked(GetLoggerMetrics(clear=clear)), LoggerMetrics)

    # --- weights ---

    async def refit(
        self,
        weights: torch.nn.Module | Weights,
        specs: Sequence[TensorShape] | None = None,
        **options: Unpack[RefitOptions],
    ) -> RefitReport:
        """Makes the engine serve `weights`, and returns when every worker holds them: they may change at once.

        A module whose parameters are shared (`share_parameters`) is read in place; if they are sharded, every rank of
        torch.distributed calls this, with the same options, and gets the same report. Any other module, a mapping from
        checkpoint names to tensors, or an iterator of such pairs goes through staging buckets; an iterator is
        consumed as they fill, on this thread. What it will yield has to be announced before: `specs` if given, else
        what it yielded last time, else the engine's own tensors in the dtype of the first one; `LayoutMismatch` if
        something else comes.

        Options; what is left out is as the daemon is configured:

        `only`: names of the tensors to change, the others stay. `version`: the new number, by default one more.
        `policy`: for requests in flight: "finish" waits for them, "keep" goes on with their KV, "recompute" goes on
            with KV of the new weights, "abort" cuts them off.
        `attest`: compare source and destination afterwards: "off", "sampled", "full".
        `check_finite`: refuse NaN and infinity before anything is written.
        `deadline_seconds`: of the whole, 300 by default.

        Of a module that has been prepared (`prepare_refit`) it is the end of that; options left out are as prepared.

        When it is cancelled, interrupted or raises, the daemon has ended it too, unless it cannot be reached.
        """
        if (prepared := take(self._prepared, weights, specs, options)) is not None:
            await prepared.refit()
            return prepared.report()
        with refused_beside(self._prepared, weights, specs, options):
            return await walk(self.refit_steps(weights, specs, options))

    async def prepare_refit(self, module: torch.nn.Module, **options: Unpack[PrepareOptions]) -> AsyncPreparedRefit:
        """All of a refit but its copy, before the weights are final: see `Daemon.prepare_refit`. To be awaited, its
        result entered by `async with`.
        """
        preparation = await walk(self.prepare_steps(module, options))
        return AsyncPreparedRefit(preparation, Terms(module, options), self._prepared)

    async def reload(self, path: str | os.PathLike[str] | None = None, **options: Unpack[CommitOptions]) -> RefitReport:
        """Makes the engine serve a checkpoint's weights: of the model's own directory, or of another with the same
        architecture, by its absolute path on the daemon's machine.
        """
        return await reload(self.connection, self._role, None if path is None else os.fsdecode(path), options)

    async def collective(self, address: str | None = None, **options: Unpack[CollectiveOptions]) -> AsyncCollective:
        """A group of this process and the engine's workers, for weights on other GPUs or another machine than the
        engine's; to be awaited, its result entered by `async with`.

        `address` is this machine's, as the engine reaches it; by default it is found out. Raises `RefitdError` with
        code `collective_failed`, in the time given.
        """
        from refit_trainer.collective import AsyncCollective

        return AsyncCollective(await walk(self.collective_steps(address, options)))

    async def join_collective(
        self, address: str, port: int, world_size: int, first_rank: int = 1, *, timeout_seconds: float = 60.0
    ) -> CollectiveJoined:
        """The engine's workers join a group that another process hosts by `BroadcastGroup.host`."""
        return await join_group(
            self.connection,
            self._role,
            address,
            port,
            world_size,
            first_rank,
            plan=self._plan,
            timeout_seconds=timeout_seconds,
        )

    async def receive_refit(
        self, source: int, tensors: Sequence[TensorShape], **options: Unpack[RefitOptions]
    ) -> RefitReport:
        """Commits what the host of a joined group broadcasts meanwhile: `tensors`, in this order, or those of them that
        `only` names.
        """
        return await refit_by_broadcast(self.connection, self._role, source, tensors, options)

    async def restore(self) -> WeightsRestored:
        """Puts back the last committed weights that the daemon kept."""
        return await restore(self.connection, self._role, timeout_seconds=SLOW_SECONDS)

    async def acquire_writer(self, *, takeover: bool = False) -> None:
        """Becomes the one session that may refit, as the first refit does by itself; `takeover` fences another off."""
        await self._role.acquire(takeover=takeover, timeout_seconds=self._timeout_seconds)

    async def release_writer(self) -> None:
        await self._role.release(timeout_seconds=self._timeout_seconds)

    # --- generation ---

    def generate(
        self, prompts: Iterable[Prompt], sampling: Sampling | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncReplies[Sample]:
        """Yields `len(prompts) * sampling.n` samples, each as soon as it is finished: not in the order of the prompts.

        `prompts` are token ids (lists, arrays, one-dimensional tensors), or texts. Options:

        `deadline_seconds`: outputs that are not finished by then are cut off; by default the daemon's own setting.
        `incomplete`: an output that was cut off (by a deadline, policy `abort`, NaN, a dead engine) raises
            `OutputIncomplete` ("raise", the default), or comes like others ("yield"): see `Sample.complete`. Outputs
            that the caller cancelled always come.
        `min_version`: wait until weights of at least this version are served, within the deadline and the daemon's
            `refit.gate_wait_seconds`. `max_version_lag` is subtracted from it.
        `priority`: lower is served first. `lora`: an adapter's name. `routed_experts`: ask for them.
        """
        return self._replies(prompts, sampling, options, SampleAssembler().add)

    def stream(
        self, prompts: Iterable[Prompt], sampling: Sampling | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncReplies[Delta]:
        """Yields tokens as the engine makes them; arguments as for `generate`. The last `Delta` of an output has a
        `finish_reason`; where that output was cut off, `OutputIncomplete` is raised behind it.
        """
        return self._replies(prompts, sampling, options, same)

    async def generate_one(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[GenerateOptions]
    ) -> Sample:
        """The first finished sample of one prompt; others that `sampling.n` asks for are cancelled. Options as for
        `generate`.
        """
        async with self.generate([prompt], sampling, **options) as samples:
            return await anext(samples)

    async def cancel(self) -> list[int]:
        """Cancels every generation of this session; one alone is cancelled by its own `cancel()`."""
        return await self.connection.cancel(None, timeout_seconds=self._timeout_seconds)

    # --- the engine's life ---

    async def load_model(self) -> ModelInfo:
        """Starts the load that the daemon's configuration put off, and returns when the model can be served."""
        return (await self._ask(LoadModel(), ModelLoaded, SLOW_SECONDS)).model

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Makes a LoRA adapter known by `name` to `generate(..., lora=name)`; `path` is on the daemon's machine."""
        await self._ask(checked(LoadAdapter(name=name, path=os.fsdecode(path))), AdapterLoaded, SLOW_SECONDS)

    async def unload_adapter(self, name: str) -> None:
        """Requests under way go on with it."""
        await self._ask(checked(UnloadAdapter(name=name)), AdapterUnloaded, SLOW_SECONDS)

    async def reset_prefix_cache(self) -> None:
        await self._ask(ResetPrefixCache(), PrefixCacheReset)

    async def sleep(self, level: Literal[1, 2] = 1, policy: InflightPolicy = "finish") -> SleepStateChanged:
        return await self._ask(checked(Sleep(level=level, policy=policy)), SleepStateChanged, SLOW_SECONDS)

    async def wake_up(self, tags: list[SleepTag] | None = None) -> SleepStateChanged:
        return await self._ask(checked(WakeUp(tags=tags)), SleepStateChanged, SLOW_SECONDS)

    def verify_steps(self, weights: torch.nn.Module | Mapping[str, torch.Tensor], *, full: bool) -> Steps[bool]:
        """`verify`, for a caller on another thread than the event loop's."""
        import torch

        from refit_trainer.digest import weights_digest
        from refit_trainer.names import checkpoint_tensors

        mode = DigestMode.FULL if full else DigestMode.SAMPLED
        tensors = checkpoint_tensors(weights) if isinstance(weights, torch.nn.Module) else weights
        manifest: Manifest = yield self.manifest()
        served: WeightsDigest = yield self.digest(mode.value)
        return weights_digest(tensors, manifest.tensors, mode) == served.digest

    def refit_steps(
        self, weights: torch.nn.Module | Weights, specs: Sequence[TensorShape] | None, options: RefitOptions
    ) -> Steps[RefitReport]:
        """`refit`, for a caller on another thread than the event loop's: see `steps`."""
        import torch

        from refit_trainer.names import checkpoint_tensors
        from refit_trainer.sharing import shared_before
        from refit_trainer.staging import Staging

        only, rest, timeout_seconds = split_options(options)
        target = self.one_refit(timeout_seconds)
        if isinstance(weights, torch.nn.Module):
            if (shared := shared_before(weights)) is not None:
                if not shared.sharded:
                    return (yield from refit_in_place(target, shared, only, rest))
                shared.require_in_place()
                shared.memory.synchronise()
                return (yield from self._ranked().refit(shared, options))
            weights = checkpoint_tensors(weights)
        if self._staging is None:
            self._staging = Staging(self._bucket_bytes)
        staged: Steps[RefitReport] = self._staging.refit(target, weights, specs, only, rest, self.manifest)
        return (yield from staged)

    def prepare_steps(self, module: torch.nn.Module, options: PrepareOptions) -> Steps[Preparation]:
        """`prepare_refit`, for a caller on another thread than the event loop's."""
        from refit_trainer.sharing import shared_by_one

        check_options("prepare_refit", options, PrepareOptions)
        terms: PrepareOptions = {**options}
        hold_seconds = terms.pop("hold_seconds", None)
        only, rest, timeout_seconds = split_options(terms)
        shared = shared_by_one(module)
        target = self.one_refit(timeout_seconds)
        again = partial(self.refit_steps, module, None, terms)
        return (yield from prepare_steps(target, shared, only, rest, hold_seconds, again))

    def one_refit(self, timeout_seconds: float) -> DaemonRefit:
        """The commands of a refit one by one, each answered within `timeout_seconds`."""
        return DaemonRefit(self.connection, self._role, timeout_seconds)

    def collective_steps(self, address: str | None, options: CollectiveOptions) -> Steps[Broadcaster]:
        """`collective`, for a caller on another thread than the event loop's."""
        from refit_trainer.collective import form_steps

        return form_steps(self.connection, self._role, self._plan, self.status, address, options)

    async def send_generate(self, command: Generate, blobs: list[bytes], mailbox: Mailbox) -> int:
        """For iterators of other kinds than `AsyncReplies`: the id of the request whose replies go to `mailbox`."""
        return await self.connection.generate(command, blobs, mailbox, timeout_seconds=self._timeout_seconds)

    # --- inside ---

    def _ranked(self) -> RankedRefits:
        from refit_trainer.ranks import RankedRefits

        if self._ranks is None:
            self._ranks = RankedRefits(self.connection, self._role, self._plan)
        return self._ranks

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
        reading = reading_of(options)
        command, blobs = generate_command(prompts, sampling, options)

        async def start(mailbox: Mailbox) -> int:
            return await self.send_generate(command, blobs, mailbox)

        return AsyncReplies(self.connection, start, convert, reading)


async def _open(endpoint: str, timeout_seconds: float, options: ConnectOptions) -> AsyncDaemon:
    socket_path(endpoint)
    connection = Connection(
        ConnectionOptions(
            endpoint=endpoint,
            client=options.get("client", "refit_trainer"),
            lease_seconds=options.get("lease_seconds"),
            patience_seconds=options.get("patience_seconds"),
            curve=options.get("curve"),
        )
    )
    await connection.open(timeout_seconds)
    return AsyncDaemon(connection, options.get("request_seconds", timeout_seconds), options)


def _why_not_ready(state: EngineState) -> str:
    """With what helps, where it does not pass by itself."""
    if state in NOT_SERVABLE:
        return NOT_SERVABLE[state][1]
    return f"the engine is still {state.value}"


def _why_dead(status: Status) -> RefitdError:
    """A daemon whose engine did not start or died says so for a moment before it ends."""
    if status.last_error is None:
        return RefitdError("the engine has died, the daemon ends", code=ErrorCode.ENGINE_DEAD, fault=Fault.ENGINE)
    message = f"{status.last_error.message}; the daemon ends"
    return RefitdError(message, code=status.last_error.code, fault=Fault.ENGINE)


def same(delta: Delta) -> Delta:
    return delta
