"""Generation: prompts in, deltas out, every token stamped with the version of the weights that made it.

A step of the engine is handed over for all requests at once; each client gets one message for it. What a client has not
taken yet simply stays here and goes out with the next message, so a slow reader's deltas merge by themselves.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

import structlog

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import (
    AcknowledgeGeneration,
    CancelGeneration,
    Generate,
    GenerationCancelled,
    GenerationForgotten,
    GenerationResumed,
    ResumeGeneration,
    TokensGenerated,
)
from refitd.adapters import Adapters
from refitd.config import Config
from refitd.deltas import MESSAGE_BYTES, deltas_message
from refitd.engine import Engine, PreparedRequest, StepOutput
from refitd.gate import Gate
from refitd.output import Job, Output
from refitd.prompts import read_prompts
from refitd.sampling import resolve
from refitd.sessions import Answer, Call, Session

log = structlog.get_logger()

Send = Callable[[bytes, int, Answer], None]


class Generation:
    """All running and all unacknowledged requests. Belongs to the event loop's thread."""

    def __init__(self, config: Config, engine: Engine, gate: Gate, adapters: Adapters) -> None:
        self._config = config
        self._engine = engine
        self._gate = gate
        self._adapters = adapters
        self._keys = itertools.count(1)
        self._outputs: dict[str, Output] = {}
        self._jobs: dict[Session, dict[int, Job]] = {}
        self._dirty: dict[Session, dict[Output, None]] = {}
        self._cancelled_early: dict[Session, set[int]] = {}
        self._withdrawals: set[asyncio.Task[None]] = set()
        self.generated_tokens = 0
        self.send: Send = lambda _identity, _request, _answer: None
        self.can_send: Callable[[Session], bool] = lambda _session: True
        self.on_tokens: Callable[[int], None] = lambda _count: None
        self.on_merged: Callable[[int], None] = lambda _deltas: None
        self.on_finished: Callable[[Job], None] = lambda _job: None
        engine.on_step = self.take_step
        gate.on_publish.append(self._readmit_unstarted)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, call: Call) -> AsyncIterator[Answer]:
        """Streams tokens to the session's connection; the last reply is `GenerationFinished`."""
        assert isinstance(call.body, Generate)
        job = self._accept(call, call.body)
        if job.request in self._cancelled_early.get(call.owner, ()):
            self._cancel_job(job, None)
        with self._adapters.uses.held(None if job.adapter is None else job.adapter.id):
            try:
                await self._start(job)
                await self._until_done(job)
            except BaseException:
                await self._discard(job)
                raise
            finally:
                job.ended()
                self.on_finished(job)
        if not job.paused:
            yield self._finished(job)

    def cancel(self, call: Call) -> Answer:
        assert isinstance(call.body, CancelGeneration)
        jobs = self._jobs_of(call.owner)
        wanted = list(jobs) if call.body.request is None else [call.body.request]
        running = [request for request in wanted if request in jobs and not jobs[request].done.is_set()]
        for request in running:
            self._cancel_job(jobs[request], None)
        self._flush(call.owner)
        self._note_early(call.owner, call.body.request)
        return Answer(GenerationCancelled(requests=running))

    def resume(self, call: Call) -> Answer:
        """Sends again, to the session's present connection, what lies behind the cursors."""
        assert isinstance(call.body, ResumeGeneration)
        job = self._jobs_of(call.owner).get(call.body.request)
        if job is None or not job.stream:
            raise ProtocolError(
                ErrorCode.UNKNOWN_REQUEST, f"request {call.body.request} is not kept: it never was, or was acknowledged"
            )
        job.paused = False
        if job.announced and not call.body.cursors:
            self._send_started(job)
        cursors = {(cursor.prompt, cursor.output): cursor.position for cursor in call.body.cursors}
        for output in job.outputs:
            output.rewind(cursors.get((output.prompt, output.index), 0))
            self._mark(call.owner, output)
        self._flush(call.owner)
        finished = job.done.is_set()
        if finished:
            self.send(call.owner.identity, job.request, self._finished(job))
        return Answer(GenerationResumed(request=job.request, finished=finished))

    def acknowledge(self, call: Call) -> Answer:
        assert isinstance(call.body, AcknowledgeGeneration)
        jobs = self._jobs_of(call.owner)
        known = [request for request in call.body.requests if request in jobs and jobs[request].done.is_set()]
        for request in known:
            del jobs[request]
        return Answer(GenerationForgotten(requests=known))

    # --- the engine's side --------------------------------------------------------------------------------------------

    def take_step(self, steps: Sequence[StepOutput]) -> None:
        """One engine step: stamps, stores, sends. Called synchronously, so that no version change can slip between."""
        version = self._gate.version
        withdrawn: list[str] = []
        tokens = 0
        touched: set[Session] = set()
        for step in steps:
            output = self._outputs.get(step.request_id)
            if output is None:
                continue
            tokens += output.take(step, version)
            if output.error is ErrorCode.NOT_A_NUMBER:
                self._engine.note_nan()
            if output.finish_reason is not None:
                self._retire(output, withdrawn if step.finish_reason is None else None)
            if output.job.stream:
                self._mark(output.job.session, output)
                touched.add(output.job.session)
        for session in touched:
            self._flush(session)
        self.generated_tokens += tokens
        self.on_tokens(tokens)
        if withdrawn:
            self._withdraw_later(withdrawn)

    def flush_identity(self, identity: bytes) -> None:
        """The connection can take messages again."""
        for session in list(self._dirty):
            if session.identity == identity:
                self._flush(session)

    async def abort_all(self, error: ErrorCode) -> None:
        """Ends every running request as cancelled, by `error`; its tokens so far are delivered.

        Requests that still wait at the gate are not touched: it admits or refuses them itself.
        """
        jobs = list({output.job: None for output in self._outputs.values()})
        keys = [output.key for job in jobs for output in job.outputs if output.finish_reason is None]
        for job in jobs:
            self._cancel_job(job, error, withdraw=False)
        for session in list(self._dirty):
            self._flush(session)
        await self._engine.withdraw(keys)

    def session_resumed(self, session: Session) -> None:
        """What its streams would say now the client could not tell from what was lost: each waits for its cursors."""
        for job in self._jobs_of(session).values():
            job.paused = job.stream
        self._dirty.pop(session, None)

    async def session_closed(self, session: Session, _why: str) -> None:
        """Nobody waits for these any more: they leave the engine."""
        jobs = self._jobs.pop(session, {})
        self._dirty.pop(session, None)
        self._cancelled_early.pop(session, None)
        for job in jobs.values():
            await self._discard(job)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _accept(self, call: Call, body: Generate) -> Job:
        """Everything that can be refused without the engine is refused here."""
        refusal = self._gate.refusal()
        if refusal is not None:
            raise refusal
        info = self._engine.info
        assert info is not None
        jobs = self._jobs_of(call.owner)
        kept_bytes = sum(job.size_bytes for job in jobs.values())
        if kept_bytes > self._config.server.max_buffered_bytes:
            raise ProtocolError(
                ErrorCode.TOO_MANY_REQUESTS, f"{kept_bytes} bytes of results wait for AcknowledgeGeneration"
            )
        prompts = read_prompts(body, call.blobs, info.model, self._config.server, self._engine.tokenize)
        adapter = self._adapters.find(body.lora)
        resolved = resolve(body, prompts, info)
        self._check_capacity(len(prompts) * body.sampling.n)
        job = Job(call.owner, call.id, body, prompts, resolved, adapter)
        # What vLLM would refuse it refuses for the first prompt, before the client hears that it has started.
        self._prepared(job, 0)
        jobs[call.id] = job
        return job

    def _note_early(self, session: Session, wanted: int | None) -> None:
        """A request that came just before its cancellation has a task, but no job yet: it is cancelled as a job."""
        begun = session.tasks.keys() - self._jobs_of(session).keys()
        early = self._cancelled_early.get(session, set()) | (begun if wanted is None else {wanted})
        self._cancelled_early[session] = early & begun

    def _prepared(self, job: Job, prompt: int) -> PreparedRequest:
        """The prompt in the engine's form, common to all its outputs."""
        if prompt not in job.prepared:
            job.prepared[prompt] = self._engine.prepare(
                job.prompt_ids[prompt],
                job.body.sampling,
                max_tokens=job.resolved.max_tokens[prompt],
                stop_token_ids=job.resolved.stop_token_ids,
                priority=job.body.priority,
                adapter=job.adapter,
            )
        return job.prepared[prompt]

    def _check_capacity(self, more: int) -> None:
        limit = self._config.generation.max_running_requests
        accepted = sum(job.unfinished for jobs in self._jobs.values() for job in jobs.values())
        if accepted + more > limit:
            raise ProtocolError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{accepted} sequences run or wait, {more} more would pass the limit {limit}",
            )

    async def _start(self, job: Job) -> None:
        """Where nothing has to be waited for the engine hears of it before the client: it can begin meanwhile."""
        wanted = job.body.min_version
        if wanted is not None and job.body.max_version_lag is not None:
            wanted = max(0, wanted - job.body.max_version_lag)
        if not self._gate.is_open_to(wanted):
            self._announce(job)
        await self._submit_all(job, wanted)
        self._announce(job)
        job.submitted()

    def _announce(self, job: Job) -> None:
        """Says once that it has started, before any of its tokens."""
        if job.stream and not job.announced:
            job.announced = True
            if not job.paused:
                self._send_started(job)

    def _send_started(self, job: Job) -> None:
        self.send(job.session.identity, job.request, Answer(job.started(), last=False))

    async def _submit_all(self, job: Job, wanted: int | None) -> None:
        for output in job.outputs:
            version = await self._admit(job, wanted)
            if job.done.is_set():
                return
            await self._submit(output, version)

    async def _admit(self, job: Job, wanted: int | None) -> int:
        """The version served; returns early, for nothing, when the job is cancelled while it waits.

        The gate may have shut again before the waiting task had its turn: nothing is awaited after the last look.
        """
        while not (self._gate.is_open_to(wanted) or job.done.is_set()):
            await self._wait_at_gate(job, wanted)
        return self._gate.version

    async def _wait_at_gate(self, job: Job, wanted: int | None) -> None:
        wait = self._gate.admit(wanted, job.remaining_seconds(self._deadline(job)))
        admitted, done = asyncio.ensure_future(wait), asyncio.ensure_future(job.done.wait())
        try:
            await asyncio.wait({admitted, done}, return_when=asyncio.FIRST_COMPLETED)
            if not job.done.is_set():
                await admitted
        finally:
            admitted.cancel()
            done.cancel()

    async def _submit(self, output: Output, version: int) -> None:
        output.key = f"refitd-{next(self._keys)}"
        prepared = self._prepared(output.job, output.prompt)
        request, output.detokenizer = self._engine.numbered(prepared, output.key, seed=output.seed, version=version)
        self._outputs[output.key] = output
        self._gate.enter()
        try:
            await self._engine.submit(request)
        except BaseException:
            self._forget(output)
            raise

    async def _readmit_unstarted(self, version: int) -> None:
        """Called between freeze and thaw: what has no token yet starts afresh, under the new version's cache salt."""
        unstarted = [output for output in self._outputs.values() if not output.token_ids]
        await self._engine.withdraw([output.key for output in unstarted])
        for output in unstarted:
            self._forget(output)
        for output in unstarted:
            if output.finish_reason is None:
                await self._submit(output, version)

    async def _until_done(self, job: Job) -> None:
        try:
            async with asyncio.timeout(job.remaining_seconds(self._deadline(job))):
                await job.done.wait()
        except TimeoutError:
            self._cancel_job(job, ErrorCode.DEADLINE_EXCEEDED)
            self._flush(job.session)

    def _deadline(self, job: Job) -> float | None:
        return job.body.deadline_seconds or self._config.generation.deadline_seconds

    def _finished(self, job: Job) -> Answer:
        """Carries what the client has not been sent: of a stream only where its connection was full."""
        if job.stream:
            self._flush(job.session)
        else:
            self._drop(job)
        deltas, blobs = deltas_message(iter(job.outputs))
        return Answer(job.finished(deltas), blobs=blobs)

    def _flush(self, session: Session) -> None:
        """All that is new for this client, in one message if it fits, unless its connection is full: then it merges."""
        dirty = self._dirty.get(session)
        if not dirty:
            return
        if not self.can_send(session):
            self.on_merged(len(dirty))
            return
        del self._dirty[session]
        for output in dirty:
            self._announce(output.job)
        unsent = iter(dirty)
        while self.can_send(session):
            deltas, blobs = deltas_message(unsent, MESSAGE_BYTES)
            if not deltas:
                return
            self.send(session.identity, 0, Answer(TokensGenerated(deltas=deltas), blobs=blobs, last=False))
        for output in unsent:
            self._mark(session, output)

    def _mark(self, session: Session, output: Output) -> None:
        if not session.closed and not output.job.paused:
            self._dirty.setdefault(session, {})[output] = None

    def _jobs_of(self, session: Session) -> dict[int, Job]:
        return self._jobs.setdefault(session, {})

    def _drop(self, job: Job) -> None:
        """Nothing is kept for a session that has ended."""
        self._jobs.get(job.session, {}).pop(job.request, None)

    def _cancel_job(self, job: Job, error: ErrorCode | None, *, withdraw: bool = True) -> None:
        running = [output for output in job.outputs if output.finish_reason is None]
        for output in running:
            output.cancel(error)
            self._retire(output, None)
            if job.stream:
                self._mark(job.session, output)
        if withdraw:
            self._withdraw_later([output.key for output in running if output.key])

    def _retire(self, output: Output, withdrawn: list[str] | None) -> None:
        """The output is complete; `withdrawn` collects keys the engine does not know to be finished."""
        if withdrawn is not None:
            withdrawn.append(output.key)
        self._forget(output)
        output.job.output_finished()

    def _forget(self, output: Output) -> None:
        if self._outputs.pop(output.key, None) is not None:
            self._gate.leave()

    def _withdraw_later(self, keys: list[str]) -> None:
        task = asyncio.create_task(self._engine.withdraw(keys), name="withdraw")
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    async def _discard(self, job: Job) -> None:
        running = [output for output in job.outputs if output.finish_reason is None]
        for output in running:
            output.cancel(ErrorCode.CANCELLED)
            self._forget(output)
        job.complete()
        self._drop(job)
        await self._engine.withdraw([output.key for output in running if output.key])
