"""The synchronous fleet: `AsyncFleet` on an event loop in one background thread, callable from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self, Unpack

from refit_protocol.messages import Sampling
from refit_trainer.aio import same
from refit_trainer.client import LoopThread
from refit_trainer.fleet.aio import AsyncFleet, FleetGenerateOptions, FleetOptions, order_of
from refit_trainer.fleet.members import FleetStatus
from refit_trainer.fleet.order import Order
from refit_trainer.fleet.refits import FleetReport
from refit_trainer.prompts import Prompt
from refit_trainer.refits import CommitOptions, RefitOptions
from refit_trainer.replies import Item, Replies, ThreadMailbox
from refit_trainer.steps import walk_blocking
from refit_trainer.stream import Delta, Sample, SampleAssembler

if TYPE_CHECKING:
    import torch

    from refit_protocol.tensors import TensorShape
    from refit_trainer.staging import Weights


class Fleet:
    """Several daemons that serve one model; made by `connect()`. In a forked child it refuses to work."""

    def __init__(self, thread: LoopThread, fleet: AsyncFleet) -> None:
        self._thread = thread
        self._fleet = fleet

    @classmethod
    def connect(cls, endpoints: Sequence[str], timeout_seconds: float = 10.0, **options: Unpack[FleetOptions]) -> Self:
        """Opens a session with each daemon that answers; see `AsyncFleet.connect`."""
        thread = LoopThread()
        try:
            return cls(thread, thread.call(_connected(endpoints, timeout_seconds, options)))
        except BaseException:
            thread.stop()
            raise

    @property
    def version(self) -> int:
        """The newest version that this fleet has seen to be served."""
        return self._fleet.version

    def close(self) -> None:
        """Ends all sessions and the thread; does nothing the second time, or in a forked child."""
        self._thread.end(self._fleet.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> FleetStatus:
        """Asks every daemon; one that is down has `probe_seconds` to come up."""
        return self._thread.call(self._fleet.status())

    def leave_out(self, endpoint: str) -> None:
        """From now on neither refitted nor asked for tokens, until `take_in`."""
        self._fleet.leave_out(endpoint)

    def take_in(self, endpoint: str) -> None:
        """It takes part in the next refit again, and in generation once it serves the fleet's version."""
        self._fleet.take_in(endpoint)

    def refit(
        self,
        weights: torch.nn.Module | Weights,
        specs: Sequence[TensorShape] | None = None,
        **options: Unpack[RefitOptions],
    ) -> FleetReport:
        """Makes all daemons serve `weights`, or none; see `AsyncFleet.refit`. Iterators are read on this thread."""
        return walk_blocking(self._fleet.refit_steps(weights, specs, options), self._thread)

    def catch_up(
        self, weights: torch.nn.Module | Mapping[str, torch.Tensor], **options: Unpack[CommitOptions]
    ) -> FleetReport:
        """Brings those that are behind to the fleet's version; see `AsyncFleet.catch_up`."""
        return walk_blocking(self._fleet.catch_up_steps(weights, options), self._thread)

    def acquire_writer(self, *, takeover: bool = False) -> None:
        self._thread.call(self._fleet.acquire_writer(takeover=takeover))

    def generate(
        self, prompts: Iterable[Prompt], sampling: Sampling | None = None, **options: Unpack[FleetGenerateOptions]
    ) -> Replies[Sample]:
        """Yields `len(prompts) * sampling.n` samples, each as soon as it is finished, all of one version."""
        return self._replies(order_of(prompts, sampling, options, whole=True), SampleAssembler().add)

    def stream(
        self, prompts: Iterable[Prompt], sampling: Sampling | None = None, **options: Unpack[FleetGenerateOptions]
    ) -> Replies[Delta]:
        """Yields tokens as the engines make them; see `AsyncFleet.stream`."""
        return self._replies(order_of(prompts, sampling, options, whole=False), same)

    def cancel(self) -> list[int]:
        """Cancels every batch of this fleet."""
        return self._thread.call(self._fleet.cancel())

    def _replies(self, order: Order, convert: Callable[[Delta], Item | None]) -> Replies[Item]:
        mailbox = ThreadMailbox()
        number = self._thread.call(self._fleet.batches.start(order, mailbox))
        generation = (self._fleet.batches, number, mailbox)
        return Replies(generation, self._thread, convert, order.reading)


async def _connected(endpoints: Sequence[str], timeout_seconds: float, options: FleetOptions) -> AsyncFleet:
    return await AsyncFleet.connect(endpoints, timeout_seconds, **options)
