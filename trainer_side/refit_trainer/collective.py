"""Refits of a daemon on other GPUs or another machine: a group of this process and the engine's workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypedDict, Unpack
from urllib.parse import urlsplit

import torch

from refit_protocol.messages import CollectiveJoined, PlanMode, RefitReport, Status
from refit_trainer.broadcast_refits import BroadcastRefit, join_group, leave_group
from refit_trainer.connection import Connection
from refit_trainer.layouts import announced, check_selection, selected
from refit_trainer.names import checkpoint_tensors
from refit_trainer.options import Count, Port, Seconds, check_options
from refit_trainer.process_group import TIMEOUT_SECONDS, BroadcastGroup, Listener, local_address, terms_of
from refit_trainer.refits import RefitOptions, split_options
from refit_trainer.steps import Loop, Steps, walk, walk_blocking
from refit_trainer.writer import WriterRole

if TYPE_CHECKING:
    from refit_protocol.tensors import TensorShape
    from refit_trainer.staging import Weights

AskStatus: TypeAlias = Callable[[], Coroutine[Any, Any, Status]]

_LEAVE_SECONDS = 10.0


class CollectiveOptions(TypedDict, total=False):
    """Of the group. `port`: of its host, this process; 0, the default, takes a free one.

    `device`: where the weights lie; by default the engine's kind. `bucket_bytes`: of the pieces, by default 64 MiB on
    CPUs and 256 MiB on GPUs, of which each worker holds two.
    `timeout_seconds`, 60 by default, bounds joining and every wait for a piece. `trainer_ranks`: how many processes of
    the trainer are members, 1 by default; the others call `BroadcastGroup.join` and `attend`.
    """

    port: Port
    device: torch.device | str
    bucket_bytes: Count
    timeout_seconds: Seconds
    trainer_ranks: Count


class Broadcaster:
    """What both faces share: the group, and the daemon's source that it is."""

    def __init__(self, connection: Connection, role: WriterRole, group: BroadcastGroup, source: int) -> None:
        self._connection = connection
        self._role = role
        self._source = source
        self._left = False
        self.group = group

    def refit_steps(
        self, weights: torch.nn.Module | Weights, specs: Sequence[TensorShape] | None, given: RefitOptions
    ) -> Steps[RefitReport]:
        """Validated by the daemon, then broadcast, then committed."""
        only, options, timeout_seconds = split_options(given)
        if isinstance(weights, torch.nn.Module):
            weights = checkpoint_tensors(weights)
        if only is not None:
            weights, specs = _only(weights, specs, only)
        tensors, layout = self.group.laid_out(weights, specs)
        packed = self.group.packed(tensors, layout)
        # The first piece is packed before the gate closes: generation waits less, and most mistakes show up by then.
        packed = chain([first for first in [next(packed, None)] if first is not None], packed)
        refit = BroadcastRefit(self._connection, self._role, self._source, timeout_seconds)
        try:
            yield refit.enter()
            yield refit.begin(layout.tensors, options, partial=only is not None)
            with closing(self.group.sending(packed, layout)) as sending:
                for seconds in sending:
                    yield refit.pause(seconds)
            report: RefitReport = yield refit.finish()
        except BaseException as error:
            if refit.is_under_way:
                self.group.give_up("the trainer gave the refit up")
            reason: BaseException = yield refit.reason(error)
            yield refit.abort(reason)
            if reason is error:
                raise
            raise reason from error
        finally:
            yield refit.leave()
        return report

    async def close(self) -> None:
        if not self._left:
            self._left = True
            await leave_group(self._connection, self._role, self._source, timeout_seconds=_LEAVE_SECONDS)
            await asyncio.to_thread(self.group.close)


class AsyncCollective:
    """Made by `AsyncDaemon.collective()`; refits go through broadcasts of large pieces."""

    def __init__(self, broadcaster: Broadcaster) -> None:
        self._broadcaster = broadcaster

    async def refit(
        self,
        weights: torch.nn.Module | Weights,
        specs: Sequence[TensorShape] | None = None,
        **options: Unpack[RefitOptions],
    ) -> RefitReport:
        """Makes the engine serve `weights`, as `AsyncDaemon.refit` does; an iterator needs `specs` in its order.

        Nothing is broadcast before the daemon has validated everything. A failure after that breaks the group, and so
        does an interrupt once the daemon has been asked: make a new one.
        """
        return await walk(self._broadcaster.refit_steps(weights, specs, options))

    async def close(self) -> None:
        """The workers leave the group. A second time does nothing."""
        await self._broadcaster.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Collective:
    """The same for `Daemon.collective()`; belongs to the thread that uses it."""

    def __init__(self, broadcaster: Broadcaster, loop: Loop) -> None:
        self._broadcaster = broadcaster
        self._loop = loop

    def refit(
        self,
        weights: torch.nn.Module | Weights,
        specs: Sequence[TensorShape] | None = None,
        **options: Unpack[RefitOptions],
    ) -> RefitReport:
        """See `AsyncCollective.refit`."""
        return walk_blocking(self._broadcaster.refit_steps(weights, specs, options), self._loop)

    def close(self) -> None:
        """The workers leave the group. A second time does nothing."""
        self._loop.call(self._broadcaster.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def form_steps(
    connection: Connection,
    role: WriterRole,
    plan: PlanMode | None,
    ask_status: AskStatus,
    address: str | None,
    options: CollectiveOptions,
) -> Steps[Broadcaster]:
    """Hosts a group and has the engine's workers join it. Raises `RefitdError` with code `collective_failed`."""
    # What may be a device is PyTorch's to say.
    others = {name: value for name, value in options.items() if name != "device"}
    check_options("collective", others, CollectiveOptions)
    status: Status = yield ask_status()
    trainer_ranks = options.get("trainer_ranks", 1)
    timeout_seconds = options.get("timeout_seconds", TIMEOUT_SECONDS)
    world_size = trainer_ranks + len(status.devices)
    # Here and not on the loop's thread, for which another device may be the current one.
    device = torch.device(options.get("device") or _default_device(status))
    terms = terms_of(world_size, device, options.get("bucket_bytes"))
    listener = Listener(address or _own_address(connection.endpoint), options.get("port", 0))
    stopped = threading.Event()

    def host() -> BroadcastGroup:
        return BroadcastGroup.hosted(listener, terms, device, timeout_seconds, stopped)

    where = (listener.address, listener.port, world_size, trainer_ranks)
    joining = join_group(connection, role, *where, plan=plan, timeout_seconds=timeout_seconds)
    joined, group = yield _meet(joining, host, stopped)
    return Broadcaster(connection, role, group, joined.source)


async def _meet(
    joining: Coroutine[Any, Any, CollectiveJoined], host: Callable[[], BroadcastGroup], stopped: threading.Event
) -> tuple[CollectiveJoined, BroadcastGroup]:
    """Both at the same time, since each waits for the other; if one fails the other is told to stop."""
    workers = asyncio.create_task(joining)
    hosting = asyncio.create_task(asyncio.to_thread(host))
    try:
        await asyncio.wait({workers, hosting}, return_when=asyncio.FIRST_EXCEPTION)
        stopped.set()
        await asyncio.gather(workers, hosting, return_exceptions=True)
        # The daemon's reason first: it has seen both sides.
        return workers.result(), hosting.result()
    except BaseException:
        stopped.set()
        workers.cancel()
        hosting.add_done_callback(_close_late)
        raise


def _close_late(hosting: asyncio.Task[BroadcastGroup]) -> None:
    if not hosting.cancelled() and hosting.exception() is None:
        hosting.result().close()


def _only(
    weights: Weights, specs: Sequence[TensorShape] | None, only: Sequence[str]
) -> tuple[Weights, Sequence[TensorShape] | None]:
    names = frozenset(only)
    if isinstance(weights, Mapping):
        check_selection(only, weights)
        return {name: tensor for name, tensor in weights.items() if name in names}, None
    if specs is not None:
        specs = [*announced(specs, only).values()]
    return selected(weights, names), specs


def _own_address(endpoint: str) -> str:
    """Beside the daemon the loopback; else this machine's address on the way to it."""
    where = urlsplit(endpoint)
    if where.scheme == "ipc":
        return "127.0.0.1"
    assert where.hostname is not None, "the connection is open"
    return local_address(where.hostname, where.port or 1)


def _default_device(status: Status) -> str:
    return "cpu" if status.devices[0] == "cpu" else f"cuda:{torch.cuda.current_device()}"
