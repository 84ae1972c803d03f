"""The synchronous client: `AsyncDaemon` on an event loop in one background thread, callable from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from refit_protocol.messages import (
    InflightPolicy,
    LoggerMetrics,
    Manifest,
    ModelInfo,
    Sampling,
    SleepStateChanged,
    SleepTag,
    Status,
    WeightsDigest,
    WeightsRestored,
    Welcome,
)
from refit_trainer.aio import SLOW_SECONDS, AsyncDaemon, ConnectOptions, same
from refit_trainer.errors import ClientClosed, UsedAfterFork
from refit_trainer.interruptible import result_of
from refit_trainer.prepared import PreparedRefit, Terms, refused_beside, take
from refit_trainer.prompts import GenerateOptions, Prompt, generate_command, reading_of
from refit_trainer.refits import CommitOptions, PrepareOptions, RefitOptions
from refit_trainer.replies import Item, Replies, ThreadMailbox
from refit_trainer.report import RefitReport
from refit_trainer.steps import walk_blocking
from refit_trainer.stream import Delta, Sample, SampleAssembler

if TYPE_CHECKING:
    import torch

    from refit_protocol.tensors import TensorShape
    from refit_trainer.collective import Collective, CollectiveOptions
    from refit_trainer.staging import Weights

_Result = TypeVar("_Result")
_CLEAN_UP_SECONDS = 2.0


class LoopThread:
    """An event loop in a thread of its own, until `stop()`."""

    def __init__(self) -> None:
        import uvloop

        self._pid = os.getpid()
        # Re-entrant for the sake of signal handlers, which may close the client while their own thread hands in a call.
        self._handing_in = threading.RLock()
        self._stopped = False
        self._ended = False
        self._first: concurrent.futures.Future[Any] | None = None
        self._behind_it = asyncio.Lock()
        # Each call goes through it twice: a third less time than with asyncio's own.
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="refit_trainer", daemon=True)
        self._thread.start()

    @property
    def inherited(self) -> bool:
        """Whether this process is a fork of the one that has the thread."""
        return os.getpid() != self._pid

    def call(self, work: Coroutine[Any, Any, _Result], awake_seconds: float = 0.0) -> _Result:
        """The result of `work`, waited for awake for so long; when the caller is interrupted, `work` is cancelled
        before the interrupt goes on."""
        outcome = self.call_until(work, awake_seconds, _never)
        assert not isinstance(outcome, concurrent.futures.Future)
        return outcome

    def call_until(
        self, work: Coroutine[Any, Any, _Result], awake_seconds: float, is_done: Callable[[], bool]
    ) -> _Result | concurrent.futures.Future[_Result]:
        """The same, or as soon as it `is_done` but for its result the future of that, behind which comes whatever is
        handed in later."""
        running = self.submit(work)
        try:
            until = time.monotonic() + awake_seconds
            while awake_seconds and not running.done() and time.monotonic() < until:
                if is_done():
                    self._first = running
                    return running
                # Awake, and yet no hindrance to the loop's thread.
                time.sleep(0)
            return result_of(running)
        except concurrent.futures.CancelledError:
            raise ClientClosed("the client was closed meanwhile") from None
        except BaseException:
            running.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Raises `ClientClosed` after `stop()`; what was handed in before it is run to its end, or cancelled."""
        if self.inherited:
            work.close()
            raise UsedAfterFork(f"this client belongs to process {self._pid}: connect anew in process {os.getpid()}")
        with self._handing_in:
            if not self._stopped:
                return asyncio.run_coroutine_threadsafe(self._behind_first(work), self.loop)
        work.close()
        raise ClientClosed("the client has been closed")

    def submit_first(self, work: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """`submit` for what nothing that is handed in later may overtake."""
        self._first = self.submit(work)
        return self._first

    def _behind_first(self, work: Coroutine[Any, Any, _Result]) -> Coroutine[Any, Any, _Result]:
        first = self._first
        return work if first is None else _behind(first, work, self._behind_it)

    def end(self, closing: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs what `closing` makes as the last thing; nothing the second time, or in a forked child."""
        if self.inherited:
            return
        with self._handing_in:
            ended, self._ended = self._ended, True
            # The end does not come behind it, however long that takes.
            first, self._first = self._first, None
        if ended:
            return
        try:
            if first is not None:
                # What is done has its answer in a moment, and then there is a report of it.
                concurrent.futures.wait([first], timeout=_CLEAN_UP_SECONDS)
            self.call(closing())
        finally:
            self.stop()

    def stop(self) -> None:
        if self.inherited or self.loop.is_closed():
            return
        with self._handing_in:
            # Behind all that was handed in: the loop has begun it when it stops.
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._stopped = True
        self._thread.join()
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(_end_tasks())


class Daemon:
    """A session with one daemon; made by `connect()`. Any thread may call it; in a forked child it refuses to work."""

    def __init__(self, thread: LoopThread, daemon: AsyncDaemon) -> None:
        self._thread = thread
        self._daemon = daemon
        self._prepared: set[PreparedRefit] = set()

    @classmethod
    def connect(
        cls, endpoint: str | None = None, timeout_seconds: float = 10.0, **options: Unpack[ConnectOptions]
    ) -> Self:
        """Opens a session; see `AsyncDaemon.connect`."""
        thread = LoopThread()
        try:
            return cls(thread, thread.call(_connected(endpoint, timeout_seconds, options)))
        except BaseException:
            thread.stop()
            raise

    @property
    def welcome(self) -> Welcome:
        """What the daemon said when the present session was opened: its versions, limits and model."""
        return self._daemon.welcome

    def close(self) -> None:
        """Ends the session and its thread; does nothing the second time, or in a forked child."""
        self._prepared.clear()
        self._thread.end(self._daemon.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> Status:
        return self._thread.call(self._daemon.status())

    def wait_until_ready(self, timeout_seconds: float = SLOW_SECONDS) -> Status:
        """Returns when the engine serves, or needs a full refit to; see `AsyncDaemon.wait_until_ready`."""
        return self._thread.call(self._daemon.wait_until_ready(timeout_seconds))

    def openai_base_url(self) -> str:
        """What an OpenAI client takes as `base_url`; raises where there is none: see `AsyncDaemon.openai_base_url`."""
        return self._thread.call(self._daemon.openai_base_url())

    def manifest(self) -> Manifest:
        return self._thread.call(self._daemon.manifest())

    def digest(self, mode: Literal["sampled", "full"] = "sampled") -> WeightsDigest:
        return self._thread.call(self._daemon.digest(mode))

    def logger_metrics(self, clear: bool = False) -> LoggerMetrics:
        return self._thread.call(self._daemon.logger_metrics(clear))

    def verify(self, weights: torch.nn.Module | Mapping[str, torch.Tensor], *, full: bool = False) -> bool:
        """Whether the engine serves exactly these weights, by the digests of both; `full` looks at every element."""
        return walk_blocking(self._daemon.verify_steps(weights, full=full), self._thread)

    def refit(
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
            prepared.refit()
            return prepared.coming_report()
        with refused_beside(self._prepared, weights, specs, options):
            return walk_blocking(self._daemon.refit_steps(weights, specs, options), self._thread)

    def prepare_refit(self, module: torch.nn.Module, **options: Unpack[PrepareOptions]) -> PreparedRefit:
        """All of a refit but its copy, before the weights are final; to be used with `with`.

            with daemon.prepare_refit(model, policy="keep") as prepared:
                optimizer.step()
                prepared.refit()
            report = prepared.report()

        Everything is validated, requests in flight are dealt with, and the engine stands still from here on, so that
        `prepared.refit()`, or `refit(model)`, takes little more than the copy; on a GPU that begins as soon as the
        trainer's stream comes to it. It is for shared modules of one process, whose parameters are only changed in
        place meanwhile.

        Options: those of `refit`, and `hold_seconds`: how long the engine waits, by default as the daemon is configured
        (10). After that it goes on with the old weights, and `prepared.refit()` is an ordinary refit.
        """
        preparation = walk_blocking(self._daemon.prepare_steps(module, options), self._thread)
        return PreparedRefit(preparation, self._thread, Terms(module, options), self._prepared)

    def reload(self, path: str | os.PathLike[str] | None = None, **options: Unpack[CommitOptions]) -> RefitReport:
        """Makes the engine serve a checkpoint on the daemon's machine; see `AsyncDaemon.reload`."""
        return self._thread.call(self._daemon.reload(path, **options))

    def collective(self, address: str | None = None, **options: Unpack[CollectiveOptions]) -> Collective:
        """A group of this process and the engine's workers, to be used with `with`; see `AsyncDaemon.collective`."""
        from refit_trainer.collective import Collective

        broadcaster = walk_blocking(self._daemon.collective_steps(address, options), self._thread)
        return Collective(broadcaster, self._thread)

    def restore(self) -> WeightsRestored:
        return self._thread.call(self._daemon.restore())

    def acquire_writer(self, *, takeover: bool = False) -> None:
        self._thread.call(self._daemon.acquire_writer(takeover=takeover))

    def release_writer(self) -> None:
        self._thread.call(self._daemon.release_writer())

    def generate(
        self, prompts: Iterable[Prompt], sampling: Sampling | None = None, **options: Unpack[GenerateOptions]
    ) -> Replies[Sample]:
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
    ) -> Replies[Delta]:
        """Yields tokens as the engine makes them; arguments as for `generate`. The last `Delta` of an output has a
        `finish_reason`; where that output was cut off, `OutputIncomplete` is raised behind it.
        """
        return self._replies(prompts, sampling, options, same)

    def generate_one(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[GenerateOptions]
    ) -> Sample:
        """The first finished sample of one prompt; others that `sampling.n` asks for are cancelled. Options as for
        `generate`.
        """
        with self.generate([prompt], sampling, **options) as samples:
            return next(samples)

    def cancel(self) -> list[int]:
        """Cancels every generation of this session; one alone is cancelled by its own `cancel()`."""
        return self._thread.call(self._daemon.cancel())

    def load_model(self) -> ModelInfo:
        return self._thread.call(self._daemon.load_model())

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Makes a LoRA adapter known by `name`; see `AsyncDaemon.load_adapter`."""
        self._thread.call(self._daemon.load_adapter(name, path))

    def unload_adapter(self, name: str) -> None:
        self._thread.call(self._daemon.unload_adapter(name))

    def reset_prefix_cache(self) -> None:
        self._thread.call(self._daemon.reset_prefix_cache())

    def sleep(self, level: Literal[1, 2] = 1, policy: InflightPolicy = "finish") -> SleepStateChanged:
        return self._thread.call(self._daemon.sleep(level, policy))

    def wake_up(self, tags: list[SleepTag] | None = None) -> SleepStateChanged:
        return self._thread.call(self._daemon.wake_up(tags))

    def _replies(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | None,
        options: GenerateOptions,
        convert: Callable[[Delta], Item | None],
    ) -> Replies[Item]:
        reading = reading_of(options)
        command, blobs = generate_command(prompts, sampling, options)
        mailbox = ThreadMailbox()
        request = self._thread.call(self._daemon.send_generate(command, blobs, mailbox))
        generation = (self._daemon.connection, request, mailbox)
        return Replies(generation, self._thread, convert, reading)


def _never() -> bool:
    return False


async def _behind(
    first: concurrent.futures.Future[Any], work: Coroutine[Any, Any, _Result], order: asyncio.Lock
) -> _Result:
    """However `first` ends; whoever waits for that is told how. A lock lets those that wait go on in their order."""
    try:
        async with order:
            if not first.done():
                ended = asyncio.wrap_future(first)
                ended.add_done_callback(_looked_at)
                # Unlike `first` itself it may be cancelled.
                await asyncio.wait([ended])
    except BaseException:
        work.close()
        raise
    return await work


def _looked_at(future: asyncio.Future[Any]) -> None:
    """asyncio is not to complain of an error that somebody else is told."""
    if not future.cancelled():
        future.exception()


async def _end_tasks() -> None:
    """What was interrupted is cleaning up; what does not come to an end is cancelled."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if not tasks:
        return
    _, unfinished = await asyncio.wait(tasks, timeout=_CLEAN_UP_SECONDS)
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)


async def _connected(endpoint: str | None, timeout_seconds: float, options: ConnectOptions) -> AsyncDaemon:
    return await AsyncDaemon.connect(endpoint, timeout_seconds, **options)
