"""One session with a daemon: keeps it alive, takes it up again after a broken connection, notices another daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from refit_protocol.awake import awake
from refit_protocol.codec import Frame, decode_reply, encode_request
from refit_protocol.endpoint import ENDPOINT_VARIABLE, socket_path
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    PROTOCOL_VERSION,
    AcknowledgeGeneration,
    CancelGeneration,
    Fact,
    Failed,
    Generate,
    GenerationCancelled,
    GenerationForgotten,
    GenerationResumed,
    GetStatus,
    Goodbye,
    Heartbeat,
    HeartbeatAcknowledged,
    Hello,
    Request,
    RequestHeader,
    ResumeGeneration,
    SessionClosed,
    Welcome,
)
from refit_trainer.errors import (
    ClientClosed,
    DaemonRestarted,
    DaemonUnreachable,
    RefitdError,
    RequestTimedOut,
    SessionLost,
    UsedAfterFork,
)
from refit_trainer.inbox import Generation, Inbox, Mailbox, protocol_broken
from refit_trainer.link import AddressRefusedError, CurveKeys, Link, LinkRefusedError

_GOODBYE_SECONDS = 1.0
_PAUSE_BEFORE_RECONNECT_SECONDS = 0.1
# Whoever waits for an answer learns within these two times that the daemon hangs, or was stopped. The second is much
# longer than anything keeps a daemon that works from its clients: models are loaded in a thread.
_LOOK_SECONDS = 10.0
_SILENCE_SECONDS = 60.0
# Acknowledging a moment later lets many short generations share one message.
_ACKNOWLEDGE_AFTER_SECONDS = 0.02
# Measured on an H200's host: what has not run for half a millisecond is as fast as ever, after eight it takes four
# times as long.
_QUIET_SECONDS = 0.003
_PAUSE_SECONDS = 0.0003

_Fact = TypeVar("_Fact", bound=Fact)


@dataclass(frozen=True)
class ConnectionOptions:
    endpoint: str
    client: str
    lease_seconds: float | None = None
    patience_seconds: float | None = None
    curve: CurveKeys | None = None


class Connection:
    """Belongs to the event loop on which `open` was awaited."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._pid = os.getpid()
        self._inbox = Inbox()
        self._context = zmq.Context()
        self._link: Link | None = None
        self._up = asyncio.Event()
        self._lost: asyncio.Future[None] | None = None
        self._opened: asyncio.Future[None] | None = None
        self._runner: asyncio.Task[None] | None = None
        self._chores: set[asyncio.Task[None]] = set()
        self._welcome: Welcome | None = None
        self._untold_restart: DaemonRestarted | None = None
        self._refusal: RefitdError | None = None
        self._end: RefitdError | None = None
        self._acknowledging: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None

    @property
    def endpoint(self) -> str:
        return self._options.endpoint

    @property
    def welcome(self) -> Welcome:
        """What the daemon said when the present session was opened."""
        assert self._welcome is not None, "open() comes first"
        return self._welcome

    @property
    def is_up(self) -> bool:
        """Whether the daemon has greeted us and the connection has not been lost since."""
        return self._link is not None

    async def open(self, timeout_seconds: float) -> None:
        """Raises `DaemonUnreachable` after `timeout_seconds`, or the daemon's own refusal."""
        self._opened = asyncio.get_running_loop().create_future()
        self._runner = asyncio.create_task(self._run(), name="refit_trainer connection")
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._opened
        except TimeoutError:
            await self.close()
            raise self._unreachable(timeout_seconds) from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the session; whoever still waits gets `ClientClosed`. In a forked child nothing is touched."""
        if os.getpid() != self._pid or self._context.closed:
            return
        await self._say_goodbye()
        self._finish(ClientClosed("the client has been closed"))
        tasks = [*self._chores, *([self._runner] if self._runner else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.term()

    async def request(
        self,
        command: Request,
        expected: type[_Fact],
        *,
        timeout_seconds: float,
        reconnect_seconds: float | None = None,
        blobs: Sequence[Frame] = (),
    ) -> _Fact:
        """The one reply to `command`; waits for a lost connection to come back, at most `reconnect_seconds` where they
        are given, and `timeout_seconds` in all."""
        try:
            async with asyncio.timeout(timeout_seconds):
                link = await self._ready_link(command, reconnect_seconds)
                return await self._ask(link, command, expected, blobs)
        except TimeoutError:
            raise self._timed_out(command, timeout_seconds) from None

    @contextlib.contextmanager
    def attentive(self, seconds: float) -> Iterator[None]:
        """For an answer that is due within `seconds`, milliseconds; 0 changes nothing.

        Inside, the loop is awake, and the way to the daemon and back stays in use: what an answer runs through is
        several times slower when it has not run for some milliseconds.
        """
        if not seconds:
            yield
            return
        exchange = asyncio.get_running_loop().create_task(self._exchange(seconds))
        try:
            with awake(seconds):
                yield
        finally:
            exchange.cancel()

    async def generate(
        self, command: Generate, blobs: Sequence[Frame], mailbox: Mailbox, *, timeout_seconds: float
    ) -> int:
        """Sends the request whose replies go to `mailbox`, and returns its id."""
        try:
            async with asyncio.timeout(timeout_seconds):
                link = await self._ready_link(command)
                return await self._start_generation(link, Generation(command, blobs, mailbox))
        except TimeoutError:
            raise self._timed_out(command, timeout_seconds) from None

    async def cancel(self, request: int | None, *, timeout_seconds: float) -> list[int]:
        """Asks the daemon to end this generation, or all of the session; returns those that were under way."""
        command = CancelGeneration(request=request)
        return (await self.request(command, GenerationCancelled, timeout_seconds=timeout_seconds)).requests

    def abandon(self, request: int) -> None:
        """Nobody will read this generation: drops what still comes, and has the daemon stop it."""
        if self._inbox.abandon(request):
            self._later(self._stop_abandoned(request))

    # --- the life of the connection ---

    async def _run(self) -> None:
        try:
            while True:
                await self._live_one_link()
                await asyncio.sleep(_PAUSE_BEFORE_RECONNECT_SECONDS)
        except RefitdError as error:
            self._finish(error)
        except AddressRefusedError as error:
            self._fail_to_open(error)
        # The boundary of the task: a bug must reach whoever waits, not only the log.
        except Exception as error:  # noqa: BLE001
            self._finish(_bug(error))

    async def _live_one_link(self) -> None:
        self._lost = asyncio.get_running_loop().create_future()
        link = Link(self._context, self._options.endpoint, self._options.curve, self._take)
        try:
            await link.connected()
            await self._serve(link)
        except (LinkRefusedError, RefitdError) as error:
            self._refused(error)
        finally:
            self._up.clear()
            self._link = None
            link.close()
            self._start_patience()
            self._inbox.fail_answers(DaemonUnreachable("the connection broke before the answer came: outcome unknown"))

    async def _exchange(self, seconds: float) -> None:
        """Signs of life, one after the other; not at once, to stay out of the way of what was just sent."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        await asyncio.sleep(_QUIET_SECONDS)
        # Whoever waits for the answer learns by that what is wrong with the connection.
        with contextlib.suppress(RefitdError):
            while loop.time() < until:
                await self.request(Heartbeat(), HeartbeatAcknowledged, timeout_seconds=seconds)
                await asyncio.sleep(_PAUSE_SECONDS)

    def _start_patience(self) -> None:
        """Streams outlive a broken connection as long as the daemon keeps their session, or the caller is patient: from
        the first loss on, however many connections fail after it.
        """
        if self._patience is not None or self._welcome is None:
            return
        seconds = self._welcome.lease_seconds
        if self._options.patience_seconds is not None:
            seconds = min(seconds, self._options.patience_seconds)
        gone = DaemonUnreachable(f"no connection to {self._options.endpoint} for {seconds:g} s")
        self._patience = asyncio.get_running_loop().call_later(seconds, self._inbox.abandon_all, gone)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    async def _serve(self, link: Link) -> None:
        """Returns when the connection is lost; raises the daemon's refusal of our Hello."""
        assert self._lost is not None, "made with the link"
        tasks: list[asyncio.Future[None]] = [
            asyncio.create_task(self._converse(link)),
            asyncio.create_task(link.broken()),
            self._lost,
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    def _take(self, frames: list[bytes]) -> None:
        """A message from the daemon; what cannot be understood ends the link, with the reason."""
        try:
            header, blobs = decode_reply(frames)
            self._inbox.deliver(header, blobs)
        except (ProtocolError, ValueError) as error:
            broken = protocol_broken(str(error))
            # The same bytes would come again: what asked for them goes without.
            self._inbox.abandon_all(broken, resuming=True)
            self._lose(broken)
            return
        # The boundary of a message: a bug must reach whoever waits, not only the log.
        except Exception as error:  # noqa: BLE001
            self._lose(error)
            return
        if isinstance(header.body, Failed) and header.body.code is ErrorCode.NO_SESSION:
            self._lose(None)
        if self._inbox.finished:
            self._acknowledge_soon()
        if self._inbox.gaps:
            self._fill_gaps()

    def _lose(self, error: Exception | None) -> None:
        assert self._lost is not None, "made with the link"
        if self._lost.done():
            return
        if error is None:
            self._lost.set_result(None)
        else:
            self._lost.set_exception(error)

    async def _converse(self, link: Link) -> None:
        """Says Hello, lets the callers in, and renews the lease until the daemon no longer answers."""
        await self._greet(link)
        self._end_patience()
        self._link = link
        self._up.set()
        self._tell_what_waited()
        silence_seconds = min(self.welcome.lease_seconds, _SILENCE_SECONDS)
        while True:
            await self._until_heartbeat()
            try:
                async with asyncio.timeout(silence_seconds):
                    await self._ask(link, Heartbeat(), HeartbeatAcknowledged)
            except TimeoutError:
                silent = f"the daemon has been silent for {silence_seconds:g} s, so it hangs or was stopped"
                self._inbox.fail_answers(DaemonUnreachable(f"{silent}: outcome unknown"))
                return
            except SessionLost:
                return

    async def _until_heartbeat(self) -> None:
        """Until the lease needs a sign of life, or somebody has waited for the daemon for a while."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self.welcome.heartbeat_seconds
        while (left := due - loop.time()) > 0:
            await asyncio.sleep(min(left, _LOOK_SECONDS))
            if self._inbox.is_awaited:
                return

    async def _greet(self, link: Link) -> None:
        before, hello = self._welcome, self._hello()
        self._welcome = await self._ask(link, hello, Welcome)
        assert self._opened is not None, "only open() starts the task that greets"
        if before is None:
            self._opened.set_result(None)
        elif self._welcome.epoch != before.epoch:
            self._note_restart()
        elif not self._welcome.resumed:
            self._inbox.fail_generations(SessionLost("the session ended while the connection was lost"))
        else:
            await self._resume_generations(link)

    def _hello(self) -> Hello:
        return Hello(
            protocol_versions=[PROTOCOL_VERSION],
            client=self._options.client,
            pid=self._pid if self._options.endpoint.startswith("ipc://") else None,
            lease_seconds=self._options.lease_seconds,
            resume=self._welcome.session if self._welcome else None,
        )

    def _note_restart(self) -> None:
        restarted = DaemonRestarted(
            "the daemon was restarted: it serves the weights it was started with, so refit before generating"
        )
        if not self._inbox.fail_generations(restarted):
            self._untold_restart = restarted

    async def _resume_generations(self, link: Link) -> None:
        for request, generation in list(self._inbox.generations.items()):
            if generation.mailbox is None:
                await self._ask(link, CancelGeneration(request=request), GenerationCancelled)
                self._inbox.forget_abandoned(request)
            else:
                await self._resume(link, request, generation)

    async def _resume(self, link: Link, request: int, generation: Generation) -> None:
        """The daemon goes on from where this generation has come here."""
        try:
            command = ResumeGeneration(request=request, cursors=generation.resume())
            resumed = await self._ask(link, command, GenerationResumed)
            if resumed.finished:
                self._inbox.fail_generation(request, protocol_broken(f"the end of request {request} did not come"))
        except DaemonUnreachable:
            # The next connection resumes it.
            return
        except RefitdError as error:
            self._inbox.fail_generation(request, _not_kept(error))
        finally:
            generation.resuming = False

    def _fill_gaps(self) -> None:
        """Tokens were lost though this connection is there, as when the daemon had taken it for lost."""
        if self._link is None:
            return
        gaps, self._inbox.gaps = self._inbox.gaps, set()
        for request in gaps:
            generation = self._inbox.generations.get(request)
            if generation is not None and generation.has_gap:
                self._later(self._resume(self._link, request, generation))

    def _refused(self, error: LinkRefusedError | RefitdError) -> None:
        """A refused first Hello fails `open`; a later one is tried again, and its reason told to whoever waits."""
        refusal = error if isinstance(error, RefitdError) else _shut_out(self._options.endpoint, error)
        if self._welcome is None:
            raise refusal
        self._refusal = refusal

    def _finish(self, error: RefitdError) -> None:
        self._end = error
        self._end_patience()
        self._inbox.fail_answers(error)
        self._inbox.fail_generations(error)
        self._fail_to_open(error)
        # Whoever waits for the connection finds `_end` instead.
        self._up.set()

    def _fail_to_open(self, error: Exception) -> None:
        """Nothing where it is open, or is waited for no more."""
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(error)

    # --- requests ---

    async def _ready_link(self, command: Request, reconnect_seconds: float | None = None) -> Link:
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"this client belongs to process {self._pid}: connect anew in the child")
        self._check_end()
        await self._until_up(reconnect_seconds)
        self._check_end()
        if self._untold_restart is not None and not isinstance(command, GetStatus):
            restarted, self._untold_restart = self._untold_restart, None
            raise restarted
        assert self._link is not None, "up means that there is a link"
        return self._link

    def _check_end(self) -> None:
        if self._end is not None:
            raise self._end

    async def _until_up(self, reconnect_seconds: float | None) -> None:
        if self._up.is_set():
            return
        limits = [limit for limit in (self._options.patience_seconds, reconnect_seconds) if limit is not None]
        patience_seconds = min(limits, default=None)
        try:
            async with asyncio.timeout(patience_seconds):
                await self._up.wait()
        except TimeoutError:
            assert patience_seconds is not None, "nothing else expires here"
            raise self._unreachable(patience_seconds) from None

    async def _ask(self, link: Link, command: Request, expected: type[_Fact], blobs: Sequence[Frame] = ()) -> _Fact:
        request, answer = self._inbox.expect_answer()
        try:
            await self._send(link, request, command, blobs)
            reply = await answer
        finally:
            self._inbox.forget_answer(request)
        if not isinstance(reply, expected):
            raise protocol_broken(f"{type(command).__name__} was answered by {type(reply).__name__}")
        return reply

    async def _start_generation(self, link: Link, generation: Generation) -> int:
        request = self._inbox.expect_generation(generation)
        try:
            await self._send(link, request, generation.command, generation.blobs)
        except BaseException:
            self.abandon(request)
            raise
        return request

    async def _send(self, link: Link, request: int, command: Request, blobs: Sequence[Frame] = ()) -> None:
        session = None if self._welcome is None or isinstance(command, Hello) else self._welcome.session
        await link.send(encode_request(RequestHeader(id=request, body=command, session=session), blobs))

    async def _stop_abandoned(self, request: int) -> None:
        """Its end comes as that of any other, and is acknowledged; without a connection it waits for the next one."""
        if self._link is not None:
            with contextlib.suppress(DaemonUnreachable):
                await self._send(self._link, self._inbox.next_request(), CancelGeneration(request=request))

    def _tell_what_waited(self) -> None:
        for request in self._inbox.abandoned:
            self._later(self._stop_abandoned(request))
        if self._inbox.finished:
            self._acknowledge_soon()
        self._fill_gaps()

    def _acknowledge_soon(self) -> None:
        if self._acknowledging is None:
            loop = asyncio.get_running_loop()
            self._acknowledging = loop.call_later(_ACKNOWLEDGE_AFTER_SECONDS, self._acknowledge)

    def _acknowledge(self) -> None:
        self._acknowledging = None
        if self._link is not None:
            requests, self._inbox.finished = self._inbox.finished, []
            self._later(self._acknowledge_on(self._link, requests))

    async def _acknowledge_on(self, link: Link, requests: list[int]) -> None:
        try:
            await self._ask(link, AcknowledgeGeneration(requests=requests), GenerationForgotten)
        except DaemonUnreachable:
            # Said again over the next connection; a daemon that has heard it does not mind.
            self._inbox.finished.extend(requests)
        except SessionLost:
            # With it all that was kept for it is gone.
            return

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        chore = asyncio.get_running_loop().create_task(work)
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    async def _say_goodbye(self) -> None:
        if self._link is None:
            return
        with contextlib.suppress(RefitdError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._ask(self._link, Goodbye(), SessionClosed)

    # --- errors ---

    def _timed_out(self, command: Request, timeout_seconds: float) -> RefitdError:
        if self._link is None:
            return self._unreachable(timeout_seconds)
        return RequestTimedOut(f"{type(command).__name__} was not answered within {timeout_seconds:g} s")

    def _unreachable(self, timeout_seconds: float) -> DaemonUnreachable:
        reason = self._refusal or why_unreachable(self._options.endpoint)
        return DaemonUnreachable(
            f"no daemon answered at {self._options.endpoint} within {timeout_seconds:g} s: {reason}"
        )


def why_unreachable(endpoint: str) -> str:
    """What can be said from outside, for people."""
    path = socket_path(endpoint)
    if path is None:
        return "is refitd running there? Missing or wrong CURVE keys can look like silence, too"
    if not path.exists():
        return f"{path} does not exist; start refitd, or set {ENDPOINT_VARIABLE} to where it listens"
    if not os.access(path, os.W_OK):
        return f"user {os.getuid()} may not write to {path}"
    return "the socket is there, but the daemon behind it has died or hangs"


def _shut_out(endpoint: str, error: LinkRefusedError) -> DaemonUnreachable:
    keys = "; are the CURVE keys right, the daemon's and this client's?" if socket_path(endpoint) is None else ""
    return DaemonUnreachable(f"{endpoint}: {error}{keys}")


def _not_kept(error: RefitdError) -> RefitdError:
    """A request that the daemon does not know is no mistake of the caller's: it was lost on the way, or its answer."""
    if error.code is not ErrorCode.UNKNOWN_REQUEST:
        return error
    return DaemonUnreachable("the request, or the error it was answered with, was lost with the connection")


def _bug(error: Exception) -> RefitdError:
    failure = RefitdError(f"a bug in refit_trainer: {type(error).__name__}: {error}", code=ErrorCode.INTERNAL)
    failure.__cause__ = error
    return failure
