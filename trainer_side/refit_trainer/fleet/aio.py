"""The asynchronous fleet: several daemons behind the methods of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Self, TypedDict, Unpack, cast

from refit_protocol.endpoint import socket_path
from refit_protocol.errors import ErrorCode, Fault
from refit_protocol.messages import Manifest, Sampling, Status
from refit_trainer.aio import ConnectOptions, same
from refit_trainer.daemon_refit import DaemonRefit
from refit_trainer.errors import FleetMismatch, FleetRefitRefused, NoMember, NotShareable, OtherModel, RefitdError
from refit_trainer.fleet.batches import Batches
from refit_trainer.fleet.members import FleetStatus, Members, MemberState, judged, newest
from refit_trainer.fleet.order import Order
from refit_trainer.fleet.policy import OnFailure, Phase, Verdict, verdict
from refit_trainer.fleet.refits import FleetRefit, FleetReport
from refit_trainer.fleet.sameness import RequireSame, other_weights
from refit_trainer.fleet.turns import Turns
from refit_trainer.inbox import Mailbox
from refit_trainer.link import CurveKeys
from refit_trainer.opening import Opening
from refit_trainer.options import Count, Patience, Seconds, check_names, check_options
from refit_trainer.prompts import GenerateOptions, Prompt, generate_command, reading_of, refuse_misplaced
from refit_trainer.refits import CommitOptions, RefitOptions, split_options
from refit_trainer.replies import AsyncReplies, Item
from refit_trainer.steps import Steps, walk
from refit_trainer.stream import Delta, Sample, SampleAssembler

if TYPE_CHECKING:
    import torch

    from refit_protocol.tensors import TensorShape
    from refit_trainer.sharing import SharedModule
    from refit_trainer.staging import Staging, Weights

_OWN_OPTIONS = frozenset({"groups", "allow_mixed_versions"})


class FleetOptions(TypedDict, total=False):
    """`on_failure`: what a refit does when a daemon fails in it, "leave_out" by default; see `docs/fleet.md`.

    `require_same`, "weights" by default: what daemons have to agree in when the fleet connects. "model": they may serve
    any weights, as where a refit comes first. "nothing": nor is any of them asked what it serves.
    `patience_seconds` (2): how long a lost connection is waited for before its daemon counts as down.
    `probe_seconds` (2): how long a daemon may take to say how it is before it counts as down. `curve`: by endpoint.
    `bucket_bytes`, by default 64 MiB and on a GPU 512, is half of the memory of the staging buckets, which all daemons
    read.
    """

    on_failure: OnFailure
    require_same: RequireSame
    patience_seconds: Patience
    probe_seconds: Seconds
    curve: Mapping[str, CurveKeys]
    client: str
    lease_seconds: Seconds | None
    bucket_bytes: Count


class _ConnectArguments(FleetOptions, total=False):
    endpoints: list[str]
    timeout_seconds: Seconds


class FleetGenerateOptions(GenerateOptions, total=False):
    """`groups`: one a prompt; prompts of equal groups go to one daemon, as do those of one beginning without it.

    `allow_mixed_versions`: daemons may serve parts of the batch with different weights.
    """

    groups: Sequence[Hashable] | None
    allow_mixed_versions: bool


class AsyncFleet:
    """Sessions with several daemons that serve one model. Belongs to one event loop; made by `connect()`."""

    def __init__(self, members: Members, options: FleetOptions) -> None:
        self._members = members
        self._on_failure: OnFailure = options.get("on_failure", "leave_out")
        self._require_same: RequireSame = options.get("require_same", "weights")
        self._probe_seconds = options.get("probe_seconds", 2.0)
        self._bucket_bytes = options.get("bucket_bytes")
        self._turns = Turns()
        self._staging: Staging | None = None
        self.batches = Batches(members, self._turns, self._probe_seconds)

    @classmethod
    def connect(
        cls, endpoints: Sequence[str], timeout_seconds: float = 10.0, **options: Unpack[FleetOptions]
    ) -> Opening[AsyncFleet]:
        """To be awaited, or entered by `async with`: opens a session with each daemon that answers.

        Raises `NoMember` if none does within `timeout_seconds`, `FleetMismatch` where they differ: see `require_same`.
        """
        if isinstance(endpoints, str):
            raise TypeError("endpoints is one text: pass a list of endpoints")
        said = {"endpoints": [*endpoints], "timeout_seconds": timeout_seconds, **options}
        check_options("connect", said, _ConnectArguments)
        return Opening(lambda: _open(endpoints, timeout_seconds, options))

    async def join(self, timeout_seconds: float) -> None:
        """Opens the sessions and learns the version that is served.

        Raises `NoMember` where nobody answers in time, `FleetMismatch` where those that do differ.
        """
        answers = await self._members.look(timeout_seconds)
        if all(isinstance(answer, RefitdError) for answer in answers.values()):
            reasons = "; ".join(f"{endpoint}: {answer}" for endpoint, answer in answers.items())
            raise NoMember(f"no daemon of the fleet answers: {reasons}")
        self._check_same(answers)
        self._members.version = newest(answers.values()) or 0

    def _check_same(self, answers: Mapping[str, Status | RefitdError]) -> None:
        """What joins later is looked at then, and takes no part if it serves another model."""
        if models := {name: answer for name, answer in answers.items() if isinstance(answer, OtherModel)}:
            raise FleetMismatch("the daemons of a fleet serve one model", models)
        statuses = {name: answer for name, answer in answers.items() if isinstance(answer, Status)}
        if self._require_same == "weights" and (weights := other_weights(statuses)):
            advice = 'refit those that differ first, or connect with require_same="model" and refit the fleet'
            raise FleetMismatch(f"the daemons of a fleet serve the same weights as one version ({advice})", weights)

    @property
    def version(self) -> int:
        """The newest version that this fleet has seen to be served; a batch is of this one or a newer one."""
        return self._members.version

    async def close(self) -> None:
        """Ends all sessions: batches are cancelled, and memory is no longer mapped by the daemons."""
        await self.batches.close()
        await self._members.close()
        if self._staging is not None:
            self._staging.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- looking ---

    async def status(self) -> FleetStatus:
        """Asks every daemon; one that is down has `probe_seconds` to come up."""
        answers = await self._members.look(self._probe_seconds)
        self._members.note_version(answers)
        return FleetStatus(
            version=self.version,
            members=[
                judged(endpoint, answer, self.version, left_out=self._members[endpoint].left_out)
                for endpoint, answer in answers.items()
            ],
        )

    def leave_out(self, endpoint: str) -> None:
        """From now on neither refitted nor asked for tokens, until `take_in`. KeyError for a stranger."""
        self._members[endpoint].left_out = True

    def take_in(self, endpoint: str) -> None:
        """It takes part in the next refit again, and in generation once it serves the fleet's version."""
        self._members[endpoint].left_out = False

    # --- weights ---

    async def refit(
        self,
        weights: torch.nn.Module | Weights,
        specs: Sequence[TensorShape] | None = None,
        **options: Unpack[RefitOptions],
    ) -> FleetReport:
        """Makes all daemons serve `weights` as one version, or none of them; arguments as for `AsyncDaemon.refit`.

        Waits for batches under way, within `deadline_seconds`. A shared module is mapped by every daemon, anything else
        is packed once into buckets that all of them read. Raises `FleetRefitRefused` where nothing was written,
        `FleetRefitFailed` where something was; `on_failure` decides between them and a daemon that is left out, which
        the report then names. A daemon that was down or left out by a failure takes part again by itself.
        """
        return await walk(self.refit_steps(weights, specs, options))

    async def catch_up(
        self, weights: torch.nn.Module | Mapping[str, torch.Tensor], **options: Unpack[CommitOptions]
    ) -> FleetReport:
        """Brings those that are behind to the fleet's version, from weights that a daemon of that version holds.

        `weights` are compared with what such a daemon serves, by their digests, before anything is written:
        `FleetRefitRefused` if they have changed since.
        """
        return await walk(self.catch_up_steps(weights, options))

    async def acquire_writer(self, *, takeover: bool = False) -> None:
        """Becomes the one writer everywhere, as the first refit does by itself; `takeover` fences others off."""
        answers = await self._members.glance(self._probe_seconds)
        members = [self._members[name] for name, answer in answers.items() if not isinstance(answer, OtherModel)]
        taking_part = [member for member in members if member.is_up and not member.left_out]
        await asyncio.gather(*(member.daemon.acquire_writer(takeover=takeover) for member in taking_part))

    # --- generation ---

    def generate(
        self, prompts: Iterable[Prompt], sampling: Sampling | None = None, **options: Unpack[FleetGenerateOptions]
    ) -> AsyncReplies[Sample]:
        """Yields `len(prompts) * sampling.n` samples, each as soon as it is finished, all of one version.

        A sample that a dying daemon did not finish is made by another.
        """
        return self._replies(order_of(prompts, sampling, options, whole=True), SampleAssembler().add)

    def stream(
        self, prompts: Iterable[Prompt], sampling: Sampling | None = None, **options: Unpack[FleetGenerateOptions]
    ) -> AsyncReplies[Delta]:
        """Yields tokens as the engines make them.

        Where a daemon ends, outputs without a token are made by another. One in the middle is not made again: when all
        else has come, `MemberLost` names its prompt. With `incomplete="yield"` it has the end that its daemon gave it.
        """
        return self._replies(order_of(prompts, sampling, options, whole=False), same)

    async def cancel(self) -> list[int]:
        """Cancels every batch of this fleet."""
        return await self.batches.cancel(None, timeout_seconds=self._probe_seconds)

    # --- for callers on another thread than the event loop's: see `steps` ---

    def refit_steps(
        self, weights: torch.nn.Module | Weights, specs: Sequence[TensorShape] | None, options: RefitOptions
    ) -> Steps[FleetReport]:
        only, rest, timeout_seconds = split_options(options)
        turn = AsyncExitStack()
        try:
            yield _enter(turn, self._turns.refit(rest["deadline_seconds"]))
            answers = yield self._members.glance(self._probe_seconds)
            self._members.note_version(answers)
            version = rest.get("version")
            rest["version"] = _version_after(answers.values(), self.version) if version is None else version
            refit = self._refit_of(answers, timeout_seconds, partial=only is not None)
            report = yield from self._run(refit, weights, specs, only, rest)
            self._members.version = max(self.version, report.version)
            return report
        finally:
            yield turn.aclose()

    def catch_up_steps(
        self, weights: torch.nn.Module | Mapping[str, torch.Tensor], options: CommitOptions
    ) -> Steps[FleetReport]:
        check_options("catch_up", options, CommitOptions)
        everything: RefitOptions = {"only": None, **options}
        _, rest, timeout_seconds = split_options(everything)
        turn = AsyncExitStack()
        try:
            yield _enter(turn, self._turns.refit(rest["deadline_seconds"]))
            status: FleetStatus = yield self.status()
            behind = {
                member.endpoint: self._one_refit(member.endpoint, timeout_seconds)
                for member in status.members
                if member.status is not None and member.state is not MemberState.LEFT_OUT
                if member.status.version < status.version
            }
            for endpoint in behind:
                _check_local(endpoint)
            if not behind:
                return FleetReport(version=status.version, digest=None, reports={}, left_out={})
            yield from self._check_unchanged(weights, status)
            rest["version"] = status.version
            return (yield from self._run(FleetRefit(behind, {}, "leave_out"), weights, None, None, rest))
        finally:
            yield turn.aclose()

    def _run(
        self,
        refit: FleetRefit,
        weights: torch.nn.Module | Weights,
        specs: Sequence[TensorShape] | None,
        only: list[str] | None,
        options: CommitOptions,
    ) -> Steps[FleetReport]:
        import torch

        from refit_trainer.names import checkpoint_tensors
        from refit_trainer.sharing import shared_module
        from refit_trainer.staging import Staging

        if isinstance(weights, torch.nn.Module):
            if (shared := shared_module(weights)) is not None:
                shared.memory.synchronise()
                return (yield from _in_place(refit, shared, only, options))
            weights = checkpoint_tensors(weights)
        if self._staging is None:
            self._staging = Staging(self._bucket_bytes)
        return (yield from self._staging.refit(refit, weights, specs, only, options, partial(self._manifest, refit)))

    def _refit_of(
        self, answers: Mapping[str, Status | RefitdError], timeout_seconds: float, *, partial: bool
    ) -> FleetRefit:
        """Of all that the caller has not left out; those that cannot take part are judged as failed in validation."""
        refits: dict[str, DaemonRefit] = {}
        absent: dict[str, RefitdError] = {}
        for endpoint, answer in answers.items():
            if self._members[endpoint].left_out:
                continue
            _check_local(endpoint)
            if isinstance(answer, RefitdError):
                absent[endpoint] = answer
            elif partial and answer.version != self.version:
                absent[endpoint] = _needs_everything(answer.version, self.version)
            else:
                refits[endpoint] = self._one_refit(endpoint, timeout_seconds)
        taking_part = len(refits) + len(absent)
        if not taking_part:
            raise NoMember("every daemon of the fleet is left out: take_in() one", retryable=False)
        if absent and verdict(Phase.VALIDATION, absent, taking_part, self._on_failure) is Verdict.REFUSE:
            raise FleetRefitRefused("nothing was written at any daemon", absent)
        return FleetRefit(refits, absent, self._on_failure)

    def _one_refit(self, endpoint: str, timeout_seconds: float) -> DaemonRefit:
        return self._members[endpoint].daemon.one_refit(timeout_seconds)

    def _check_unchanged(
        self, weights: torch.nn.Module | Mapping[str, torch.Tensor], status: FleetStatus
    ) -> Steps[None]:
        if not status.serving:
            raise NoMember(f"version {status.version} is served nowhere: refit instead")
        daemon = self._members[status.serving[0]].daemon
        if not (yield from daemon.verify_steps(weights, full=False)):
            raise FleetRefitRefused(
                f"the weights are not those of version {status.version} any more: refit instead", {}, retryable=False
            )

    async def _manifest(self, refit: FleetRefit) -> Manifest:
        """All that take part serve one model, so that of the first who answers."""
        failed: dict[str, RefitdError] = {}
        for endpoint in refit.taking_part:
            try:
                return await self._members[endpoint].daemon.manifest()
            except RefitdError as error:
                failed[endpoint] = error
        raise FleetRefitRefused("nothing was written at any daemon", failed)

    def _replies(self, order: Order, convert: Callable[[Delta], Item | None]) -> AsyncReplies[Item]:
        async def start(mailbox: Mailbox) -> int:
            return await self.batches.start(order, mailbox)

        return AsyncReplies(self.batches, start, convert, order.reading)


async def _open(endpoints: Sequence[str], timeout_seconds: float, options: FleetOptions) -> AsyncFleet:
    for endpoint in endpoints:
        socket_path(endpoint)
    connecting: ConnectOptions = {
        "client": options.get("client", "refit_trainer fleet"),
        "lease_seconds": options.get("lease_seconds"),
        "patience_seconds": options.get("patience_seconds", 2.0),
    }
    compares = options.get("require_same") != "nothing"
    fleet = AsyncFleet(Members(endpoints, connecting, options.get("curve", {}), compares=compares), options)
    try:
        await fleet.join(timeout_seconds)
    except BaseException:
        await fleet.close()
        raise
    return fleet


def order_of(
    prompts: Iterable[Prompt], sampling: Sampling | None, options: FleetGenerateOptions, *, whole: bool
) -> Order:
    """Raises TypeError or ValueError for what is no prompt, an option that cannot be, or groups that do not fit."""
    refuse_misplaced(options)
    check_names("generate", options, FleetGenerateOptions)
    if isinstance(prompts, str):
        raise TypeError("prompts is one text: pass a list of prompts")
    listed, groups = list(prompts), options.get("groups")
    if groups is not None and len(groups) != len(listed):
        raise ValueError(f"{len(groups)} groups for {len(listed)} prompts")
    rest = cast(GenerateOptions, {name: value for name, value in options.items() if name not in _OWN_OPTIONS})
    reading_of(rest)
    generate_command(listed, sampling, rest)
    mixed = options.get("allow_mixed_versions", False)
    return Order(listed, sampling or Sampling(), rest, groups, whole, mixed)


def _check_local(endpoint: str) -> None:
    if socket_path(endpoint) is None:
        raise NotShareable(
            f"{endpoint} may be another machine, which cannot map this one's memory: refit it from a collective "
            "source (BroadcastGroup), and leave_out() it here"
        )


async def _enter(stack: AsyncExitStack, turn: AbstractAsyncContextManager[None]) -> None:
    try:
        await stack.enter_async_context(turn)
    except TimeoutError:
        busy = RefitdError("batches of the version before still run", code=ErrorCode.DEADLINE_EXCEEDED, retryable=True)
        raise FleetRefitRefused("nothing was written at any daemon", {"this fleet": busy}) from None


def _in_place(
    refit: FleetRefit, shared: SharedModule, only: list[str] | None, options: CommitOptions
) -> Steps[FleetReport]:
    """Step by step, so that whoever interrupts it waits until nothing of the module's memory is read any more."""
    try:
        yield refit.enter()
        report: FleetReport = yield refit.in_place(shared, only, options)
    except BaseException as error:
        yield refit.abort(error)
        raise
    finally:
        yield refit.leave()
    return report


def _version_after(answers: Iterable[Status | RefitdError], version: int) -> int:
    return 1 + max([version, *(answer.version for answer in answers if isinstance(answer, Status))])


def _needs_everything(served: int, version: int) -> RefitdError:
    return RefitdError(
        f"it serves version {served}, and a partial refit of {version} would mix them",
        code=ErrorCode.NOT_ALLOWED_NOW,
        fault=Fault.DAEMON,
    )
