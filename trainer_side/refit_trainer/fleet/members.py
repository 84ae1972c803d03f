"""The daemons of a fleet: connected, asked how they are, judged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from refit_protocol.messages import Status
from refit_protocol.states import EngineState
from refit_trainer.aio import AsyncDaemon, ConnectOptions
from refit_trainer.connection import why_unreachable
from refit_trainer.errors import ClientClosed, DaemonRestarted, DaemonUnreachable, NoMember, RefitdError
from refit_trainer.fleet.sameness import Model, model_of, other_model, usual
from refit_trainer.link import CurveKeys

# In these a daemon takes requests, at once or when its refit has ended.
SERVABLE = frozenset({EngineState.READY, EngineState.REFITTING, EngineState.RESTORING})
# A daemon that comes later than this is reached at the next look.
OPENING_SECONDS = 86_400.0
REQUEST_SECONDS = 10.0


class MemberState(StrEnum):
    SERVING = "serving"
    BEHIND = "behind"
    NOT_SERVABLE = "not servable"
    DOWN = "down"
    LEFT_OUT = "left out"


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`behind`: it serves an older version than the fleet. `not servable`: it loads, sleeps, drains or is torn.

    `left out`: by the caller. `status` is None, and `error` says why, where it does not answer.
    """

    endpoint: str
    state: MemberState
    status: Status | None = None
    error: RefitdError | None = None


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is the newest that the fleet knows to be served; `digests_agree` whether all who serve it hold the
    same weights, as far as their digests can be compared."""

    version: int
    members: Sequence[MemberStatus]

    @property
    def serving(self) -> list[str]:
        return [member.endpoint for member in self.members if member.state is MemberState.SERVING]

    @property
    def digests_agree(self) -> bool:
        serving = [member.status for member in self.members if member.state is MemberState.SERVING and member.status]
        return len({(status.digest_mode, status.digest) for status in serving}) <= 1


def judged(endpoint: str, answer: Status | RefitdError, version: int, *, left_out: bool) -> MemberStatus:
    """What a member is to a fleet that serves `version`."""
    if isinstance(answer, RefitdError):
        state = MemberState.LEFT_OUT if left_out else MemberState.DOWN
        return MemberStatus(endpoint=endpoint, state=state, error=answer)
    return MemberStatus(endpoint=endpoint, state=_state(answer, version, left_out=left_out), status=answer)


def newest(answers: Iterable[Status | RefitdError]) -> int | None:
    """The highest version that can be generated with, None where none can."""
    versions = [
        answer.version for answer in answers if not isinstance(answer, RefitdError) and answer.state in SERVABLE
    ]
    return max(versions, default=None)


def _state(status: Status, version: int, *, left_out: bool) -> MemberState:
    if left_out:
        return MemberState.LEFT_OUT
    if status.state not in SERVABLE:
        return MemberState.NOT_SERVABLE
    return MemberState.BEHIND if status.version < version else MemberState.SERVING


class Member:
    """One daemon of the fleet. Its session is opened whenever it is there first, and taken up again by itself.

    `model` is what it serves, None before that is known, or where nobody wants to compare it.
    """

    def __init__(self, endpoint: str, options: ConnectOptions, *, compares: bool) -> None:
        self.endpoint = endpoint
        self.left_out = False
        self.model: Model | None = None
        self._compares = compares
        self._options = options
        self._daemon: AsyncDaemon | None = None
        self._opening: asyncio.Task[AsyncDaemon] | None = None
        self._refusal: BaseException | None = None
        self._epoch: int | None = None

    @property
    def daemon(self) -> AsyncDaemon:
        """Raises `DaemonUnreachable` where it has never been reached."""
        if self._daemon is None:
            raise DaemonUnreachable(f"{self.endpoint} has not been reached yet: {why_unreachable(self.endpoint)}")
        return self._daemon

    @property
    def is_up(self) -> bool:
        return self._daemon is not None and self._daemon.connection.is_up

    @property
    def absence(self) -> DaemonUnreachable:
        """Why it is not up: what it refused the last session with, else what can be seen from outside."""
        return DaemonUnreachable(str(self._refusal or why_unreachable(self.endpoint)))

    async def reach(self, timeout_seconds: float) -> Status:
        """Raises what keeps the daemon from answering in time; the session goes on being opened."""
        try:
            async with asyncio.timeout(timeout_seconds):
                if self._daemon is None:
                    self._daemon = await self._opened()
                return await self._status(self._daemon)
        except TimeoutError:
            why = why_unreachable(self.endpoint)
            raise DaemonUnreachable(f"no answer within {timeout_seconds:g} s: {why}") from None

    def open(self) -> asyncio.Task[AsyncDaemon]:
        """Whoever waits for it or not: once the daemon is there it takes part."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._refusal = None
            self._opening = asyncio.create_task(_open(self.endpoint, self._options))
            self._opening.add_done_callback(self._note_opened)
        return self._opening

    async def close(self) -> None:
        if self._opening is None:
            return
        self._opening.cancel()
        (opened,) = await asyncio.gather(self._opening, return_exceptions=True)
        if isinstance(opened, AsyncDaemon):
            await opened.close()

    async def _opened(self) -> AsyncDaemon:
        """Goes on being opened where this is cancelled; the end of the opening is not the caller's own."""
        opening = self.open()
        await asyncio.wait({opening})
        if opening.cancelled():
            raise ClientClosed("the fleet was closed meanwhile")
        return opening.result()

    def _note_opened(self, opening: asyncio.Task[AsyncDaemon]) -> None:
        if opening.cancelled():
            return
        self._refusal = opening.exception()
        if self._refusal is None:
            self._daemon = opening.result()

    async def _status(self, daemon: AsyncDaemon) -> Status:
        status = await daemon.status()
        if self._epoch not in (None, status.epoch):
            # A restart is told once, to the next call; the fleet sees it by the version already.
            with contextlib.suppress(DaemonRestarted):
                await daemon.manifest()
            self.model = None
        self._epoch = status.epoch
        if self._compares and self.model is None and status.model is not None:
            self.model = model_of(await daemon.manifest())
        return status


async def _open(endpoint: str, options: ConnectOptions) -> AsyncDaemon:
    return await AsyncDaemon.connect(endpoint, OPENING_SECONDS, **options)


class Members:
    """`version` is the newest that was ever seen to be served here: a fleet never goes back.

    `compares`: a member that serves another model than most had at the first look answers with `OtherModel`.
    """

    def __init__(
        self, endpoints: Sequence[str], options: ConnectOptions, curve: Mapping[str, CurveKeys], *, compares: bool
    ) -> None:
        if not endpoints or len(set(endpoints)) != len(endpoints):
            raise ValueError(f"a fleet needs at least one endpoint, each once, not {list(endpoints)}")
        compares = compares and len(endpoints) > 1
        self.all = {
            name: Member(
                name, {**options, "curve": curve.get(name), "request_seconds": REQUEST_SECONDS}, compares=compares
            )
            for name in endpoints
        }
        self.version = 0
        self._closed = False
        self._model: Model | None = None

    def __getitem__(self, endpoint: str) -> Member:
        """Raises KeyError for what is no endpoint of this fleet."""
        return self.all[endpoint]

    @property
    def context_tokens(self) -> int:
        """The longest that a sequence can get; 1 where nobody is up to say it."""
        models = [member.daemon.welcome.model for member in self.all.values() if member.is_up]
        return max((model.max_model_len for model in models if model is not None), default=1)

    async def look(self, timeout_seconds: float) -> dict[str, Status | RefitdError]:
        """Asks all members at once, and gives those that are down as long to come up.

        Raises `ClientClosed` after `close()`.
        """
        self._check_open()
        answers = await asyncio.gather(*(_answer(member, timeout_seconds) for member in self.all.values()))
        return self._of_one_model(dict(zip(self.all, answers, strict=True)))

    async def glance(self, timeout_seconds: float) -> dict[str, Status | RefitdError]:
        """The same without waiting for those that are down; they are being reached meanwhile."""
        self._check_open()
        up = [member for member in self.all.values() if member.is_up]
        answers = await asyncio.gather(*(_answer(member, timeout_seconds) for member in up))
        self._check_open()
        seen = {member.endpoint: answer for member, answer in zip(up, answers, strict=True)}
        everybody = {name: seen.get(name) or member.absence for name, member in self.all.items()}
        for member in self.all.values():
            member.open()
        return self._of_one_model(everybody)

    def _of_one_model(self, answers: Mapping[str, Status | RefitdError]) -> dict[str, Status | RefitdError]:
        known = {name: member.model for name, member in self.all.items() if member.model is not None}
        if self._model is None and known:
            self._model = usual(known)
        return {name: self._compared(name, answer) for name, answer in answers.items()}

    def _compared(self, name: str, answer: Status | RefitdError) -> Status | RefitdError:
        model = self.all[name].model
        if isinstance(answer, RefitdError) or model is None or self._model is None or model == self._model:
            return answer
        return other_model("" if answer.model is None else answer.model.name, model, self._model)

    async def serving(self, timeout_seconds: float, version: int | None) -> dict[str, Status]:
        """Those that can generate, with `version` unless that is None; raises `NoMember`."""
        found = {
            name: answer
            for name, answer in (await self.glance(timeout_seconds)).items()
            if not isinstance(answer, RefitdError)
            and not self.all[name].left_out
            and answer.state in SERVABLE
            and (version is None or answer.version == version)
        }
        if not found:
            what = "can generate" if version is None else f"serves version {version}"
            raise NoMember(f"no daemon of the fleet {what}: refit, or see status()", details={"version": version})
        return found

    async def newest_version(self, timeout_seconds: float) -> int:
        """What a batch is pinned to; raises `NoMember` where the fleet's version is served nowhere."""
        version = self._newest(await self.glance(timeout_seconds))
        if version is None or version < self.version:
            raise NoMember(
                f"version {self.version} of the fleet is served nowhere: refit",
                details={"version": self.version, "served": version},
            )
        self.version = version
        return version

    def note_version(self, answers: Mapping[str, Status | RefitdError]) -> None:
        """What is served by those that are not left out: what the others serve is no version of the fleet."""
        self.version = max(self.version, self._newest(answers) or 0)

    def _newest(self, answers: Mapping[str, Status | RefitdError]) -> int | None:
        return newest(answer for name, answer in answers.items() if not self.all[name].left_out)

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("the fleet has been closed")

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(member.close() for member in self.all.values()))


async def _answer(member: Member, timeout_seconds: float) -> Status | RefitdError:
    try:
        return await member.reach(timeout_seconds)
    except RefitdError as error:
        return error
