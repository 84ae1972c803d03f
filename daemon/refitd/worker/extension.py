"""The refit calls of a vLLM worker.

vLLM appends this class to the bases of its worker (`worker_extension_cls`), never calls its constructor, and imports
this module before the model loads. Arguments and answers are message-pack natives; no method raises (see `boundary`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from refit_protocol.digest import DigestMode
from refit_protocol.tensors import BucketPiece, MemfdSegment, Segment, SourceTensor, TensorShape
from refitd.worker import commit, kv_cache
from refitd.worker.adapters import load_adapter
from refitd.worker.attest import Attest
from refitd.worker.boundary import Answer, Turns, answered, answered_in_turns, to_the_end
from refitd.worker.buckets import BucketRefit, BucketSource
from refitd.worker.collective import GroupAddress, Joining
from refitd.worker.completion import complete_in_turns
from refitd.worker.cpu_patches import apply_cpu_patches
from refitd.worker.line import open_line
from refitd.worker.loader_progress import watch_loader
from refitd.worker.memory import device_uuid
from refitd.worker.opening import open_bell, open_source
from refitd.worker.plan import listed, refuse_loader
from refitd.worker.preparation import prepare
from refitd.worker.release import open_release
from refitd.worker.reload import check_checkpoint, reload
from refitd.worker.state import WorkerState
from refitd.worker.waking import require_room
from refitd.worker.weights import EngineWeights

# How long one call receives broadcasts before it shows that the engine is alive.
RECEIVE_SECONDS = 0.2

apply_cpu_patches()
watch_loader()


class RefitWorkerExtension:
    """Methods for `collective_rpc`; every attribute starts with `refitd_`, because the worker has its own."""

    refitd_kept_state: WorkerState | None = None

    if TYPE_CHECKING:
        model_runner: Any
        vllm_config: Any
        device: torch.device
        rank: int

    @answered
    def refitd_describe(self) -> Answer:
        """`{rank, device, device_uuid, pid, dtype, bytes, manifest: [{name, dtype, shape, optional, alias_of}]}`."""
        weights = self.refitd_state().weights
        return {
            "rank": self.rank,
            "device": weights.device.type,
            "device_uuid": device_uuid(weights.device),
            "pid": os.getpid(),
            "dtype": str(weights.model_dtype).removeprefix("torch."),
            "bytes": sum(parameter.nbytes for parameter in weights.model.parameters()),
            "manifest": [msgspec.to_builtins(expected) for expected in weights.expected.values()],
        }

    @answered
    def refitd_open_line(self, path: str) -> Answer:
        """Serves calls that come over the socket at `path` as well: `{open}`, false where there is no such socket."""
        try:
            open_line(self, path)
        except OSError:
            return {"open": False}
        return {"open": True}

    # --- sources ------------------------------------------------------------------------------------------------------

    @answered
    def refitd_open_source(
        self,
        source_id: int | str,
        kind: str,
        segments: list[dict[str, Any]],
        tensors: list[dict[str, Any]],
        plan: str = "auto",
        bell: dict[str, Any] | None = None,
    ) -> Answer:
        """Maps the segments: `{path, planned, loader_tensors: [{name, why}], bytes, release}`; nothing of the engine is
        written. `release`: whether commits may wait for a word of the bell.

        Errors: `manifest_mismatch`, `memory_unavailable`, `plan_required`, `unsupported`.
        """
        state = self.refitd_state()
        state.wrote = False
        described = msgspec.convert(tensors, list[SourceTensor])
        lent = msgspec.convert(segments, list[Segment])
        word = msgspec.convert(bell, MemfdSegment | None)
        index = self.refitd_index()
        rung = open_bell(word, index, self.device) if kind == "inplace" else None
        release = open_release(word, index)
        return open_source(state, source_id, kind, lent, described, plan, rung, release)

    @answered
    def refitd_close_source(self, source_id: int | str) -> Answer:
        """Unmaps, and forgets a bucket refit under way; closing what is not open does nothing.

        Broadcasts that are being received are ended; while that cannot be done nothing may be written or put back.
        """
        return {"closed": self.refitd_state().close(source_id)}

    @answered
    def refitd_close_all(self) -> Answer:
        """Unmaps every source."""
        self.refitd_state().close_all()
        return {}

    @answered
    def refitd_validate(
        self,
        source_id: int | str,
        tensors: list[dict[str, Any]],
        only: list[str] | None = None,
        partial: bool = False,
        check_finite: bool = False,
        plan: str = "auto",
    ) -> Answer:
        """Whatever a commit or, with the `tensors` of a bucket source, a begin would refuse: `{path}`.

        Nothing is written; values that are not here yet cannot be checked.
        """
        state = self.refitd_state()
        source = state.sources.get(source_id)
        if isinstance(source, BucketSource):
            shapes = _shapes(tensors) or []
            announced = source.announce(state.weights, shapes, partial=partial, planned=plan != "off")
            refuse_loader(announced.loader_tensors, plan)
            return {"path": announced.path}
        inplace = state.inplace(source_id)
        inplace.wait_until_written()
        compiled = commit.validate(state.weights, inplace, only)
        if check_finite:
            commit.require_finite(state.weights, inplace, compiled)
        return {"path": compiled.path}

    @answered
    def refitd_rehearse(self, source_id: int | str) -> Answer:
        """What comes first in a refit from this source, for nothing: what has not run for a while takes several times
        as long."""
        self.refitd_state(look_again=False).rehearse(source_id)
        return {}

    # --- collective sources -------------------------------------------------------------------------------------------

    @answered
    def refitd_join(self, source_id: int | str, where: dict[str, Any], first_rank: int) -> Answer:
        """Sets out to join a trainer's group, in the background; `refitd_joined` says how it went."""
        address = msgspec.convert({**where, "rank": first_rank + self.refitd_index()}, GroupAddress)
        state = self.refitd_state()
        state.close(source_id)
        state.joining[source_id] = Joining(address, self.device)
        return {}

    @answered
    def refitd_joined(self, source_id: int | str, plan: str = "auto") -> Answer:
        """`{joined: false}` while the group is incomplete, else `{joined: true, backend, bucket_bytes}`.

        Errors: `collective_failed`, `memory_unavailable`; close the source then.
        """
        source = self.refitd_state().joined(source_id, planned=plan != "off")
        if source is None:
            return {"joined": False}
        terms = source.group.terms
        return {"joined": True, "backend": terms.backend, "bucket_bytes": terms.bucket_bytes}

    @answered
    def refitd_receive(self, timeout_seconds: float) -> Answer:
        """Takes broadcasts of the refit under way into the engine, for some time or until all have come: `{complete}`.

        Errors: `collective_failed`, after which the source has to be closed.
        """
        state = self.refitd_state()
        reception = state.reception()
        for arrived in reception.arrivals(RECEIVE_SECONDS, timeout_seconds):
            state.wrote = True
            arrived()
        return {"complete": reception.is_complete}

    # --- in place -----------------------------------------------------------------------------------------------------

    @answered
    def refitd_commit(
        self,
        source_id: int | str,
        only: list[str] | None = None,
        attest: str = "sampled",
        check_finite: bool = False,
        release: int | None = None,
    ) -> Answer:
        """Writes the values that are there once the trainer has released it, if it has a number for that, else now:
        `{bytes, tensors, path, loader_tensors, milliseconds, digest, digest_parts}`.

        Errors before the first byte: `unknown_source`, `manifest_mismatch`, `plan_required`, `not_finite`, and those of
        a release; after it: `attest_failed`, `refit_failed`.
        """
        state = self.refitd_state(settled=False)
        state.wrote = False
        try:
            source = state.inplace(source_id)
            return commit.commit(state, source, only, Attest(attest), finite=check_finite, release=release)
        finally:
            # What was prepared for a commit that was refused.
            state.settle()

    @answered
    def refitd_prepare(
        self, source_id: int | str, only: list[str] | None, attest: str, check_finite: bool, number: int
    ) -> Answer:
        """All of the commit that comes next before its first byte: `{waiting}`, true where its copies wait on the
        device for the source's bell to be rung for `number`. Any other call ends the waiting.

        Errors: those of `refitd_commit` before the first byte, but for what depends on values.
        """
        state = self.refitd_state()
        state.wrote = False
        source = state.inplace(source_id)
        compiled = commit.select(state.weights, source, only)
        if not check_finite:
            state.preparation = prepare(state, source, compiled, Attest(attest), number)
        return {"waiting": state.preparation is not None}

    @answered
    def refitd_stand_by(self, source_id: int | str, attest: str, number: int) -> Answer:
        """`refitd_prepare` of all of a source; its trainer may ring for `number` without another word: `{waiting}`.

        `refitd_commit` takes it up, `refitd_give_way` and any other call end it.
        """
        state = self.refitd_state()
        state.wrote = False
        source = state.inplace(source_id)
        state.preparation = ready = prepare(
            state, source, commit.select(state.weights, source, None), Attest(attest), number
        )
        if ready is not None:
            ready.stand_by()
        return {"waiting": ready is not None}

    @answered
    def refitd_give_way(self) -> Answer:
        """Nothing stands by any more, unless its trainer has rung for it: `{wrote}`. Then it waits for its commit."""
        return {"wrote": self.refitd_state(look_again=False, settled=False).give_way()}

    # --- buckets ------------------------------------------------------------------------------------------------------

    @answered
    def refitd_begin(
        self, source_id: int | str, tensors: list[dict[str, Any]] | None, partial: bool = False, plan: str = "auto"
    ) -> Answer:
        """Validates what will come, all of it unless `partial`: `{path, loader_tensors}`. Nothing is written.

        Without `tensors` the same as the last time.
        """
        state = self.refitd_state()
        # Buckets may come behind this that do not know yet how it ended.
        state.forget_refit()
        source = state.buckets(source_id)
        announced = source.announce_next(state.weights, _shapes(tensors), partial=partial, planned=plan != "off")
        refuse_loader(announced.loader_tensors, plan)
        state.refit = BucketRefit(state.weights, source, announced)
        return {"path": announced.path, "loader_tensors": listed(announced.loader_tensors)}

    @answered
    def refitd_apply_bucket(self, bucket: int, pieces: list[dict[str, Any]], layout: int | None = None) -> Answer:
        """Copies a bucket into the engine, after which it may be overwritten: `{bytes}`. `layout` gives the pieces a
        number, or stands for those that have it.

        Errors: `invalid_descriptor` for elements that came before; this bucket has then not been read. Any error ends
        the refit: buckets that were sent behind this one are not written any more.
        """
        return to_the_end(self.refitd_bucket_turns(bucket, pieces, layout))

    @answered_in_turns
    def refitd_apply_bucket_in_turns(
        self, bucket: int, pieces: list[dict[str, Any]], layout: int | None = None
    ) -> Turns:
        """The same, so that the next bucket is looked at while this one is copied."""
        return self.refitd_bucket_turns(bucket, pieces, layout)

    def refitd_bucket_turns(self, bucket: int, pieces: list[dict[str, Any]], layout: int | None) -> Turns:
        # Nothing moves while the gate is shut, and it has been since the refit was begun.
        state = self.refitd_state(look_again=False)
        refit = state.refit_under_way()
        try:
            held = refit.source.numbered(layout, tuple(msgspec.convert(pieces, list[BucketPiece])))
            number = refit.accept(held)
            for _ in refit.turns_until_written(number, bucket):
                yield
                state.require_under_way(refit)
            state.before_write(engine_stands=refit.has_written)
            return {"bytes": (yield from refit.copy_in_turns(bucket, held))}
        except BaseException:
            # Another one may have begun since.
            if state.refit is refit:
                state.refit = None
            raise

    @answered
    def refitd_finish(self, attest: str = "sampled", check_finite: bool = False, done: int | None = None) -> Answer:
        """Completes a bucket refit; answers like `refitd_commit`. `done` is told to its trainer before.

        Errors: `manifest_mismatch` for tensors that did not come whole, `not_finite`, `refit_failed`; `unknown_refit`
        where a bucket has failed.
        """
        return to_the_end(self.refitd_finish_turns(attest, check_finite, done))

    @answered_in_turns
    def refitd_finish_in_turns(
        self, attest: str = "sampled", check_finite: bool = False, done: int | None = None
    ) -> Turns:
        """The same, made ready while the last buckets are copied."""
        return self.refitd_finish_turns(attest, check_finite, done)

    def refitd_finish_turns(self, attest: str, check_finite: bool, done: int | None) -> Turns:
        # As in `refitd_apply_bucket`: nothing has moved since the refit was begun.
        state = self.refitd_state(look_again=False)
        return complete_in_turns(state, state.refit_under_way(), Attest(attest), finite=check_finite, done=done)

    @answered
    def refitd_abort(self) -> Answer:
        """Forgets the bucket refit under way; `{wrote}` says whether it has changed the engine."""
        state = self.refitd_state()
        state.refit = None
        return {"wrote": state.wrote}

    # --- from disk ----------------------------------------------------------------------------------------------------

    @answered
    def refitd_check_checkpoint(self, directory: str, plan: str = "auto") -> Answer:
        """Whether `refitd_reload` could load it: `{path, tensors, bytes}`.

        Errors: `invalid_checkpoint`, `manifest_mismatch`, `plan_required`.
        """
        state = self.refitd_state()
        state.wrote = False
        return check_checkpoint(state, Path(directory), self.vllm_config.model_config.architectures, plan)

    @answered
    def refitd_reload(
        self, directory: str, plan: str = "auto", attest: str = "sampled", check_finite: bool = False
    ) -> Answer:
        """Loads the checkpoint in `directory`; answers like `refitd_commit`.

        Errors before the first byte: those of `refitd_check_checkpoint`, `not_finite`; after it: `invalid_checkpoint`
        for a file that was changed meanwhile, `refit_failed`.
        """
        state = self.refitd_state()
        state.forget_refit()
        return reload(state, Path(directory), plan, Attest(attest), finite=check_finite)

    # --- what is served -----------------------------------------------------------------------------------------------

    @answered
    def refitd_digest(self, mode: str = "sampled") -> Answer:
        """Of what is served now: `{digest, digest_parts}`."""
        return self.refitd_state().digest(DigestMode(mode))

    @answered
    def refitd_load_adapter(self, name: str, number: int, directory: str) -> Answer:
        """`{unused}`: modules it has weights for that this worker does not have. Errors: `invalid_adapter`."""
        expected = self.refitd_state().weights.expected
        return {"unused": load_adapter(self.model_runner, expected, name, number, directory)}

    @answered
    def refitd_unload_adapter(self, number: int) -> Answer:
        """Unloading what is not loaded does nothing."""
        self.refitd_state()
        return {"unloaded": bool(self.model_runner.remove_lora(number))}

    @answered
    def refitd_cache_is_finite(self) -> Answer:
        """`{finite}`: whether no block of the KV cache holds NaN or infinity."""
        return {"finite": kv_cache.is_finite(self.model_runner.kv_caches)}

    @answered
    def refitd_clean_cache(self) -> Answer:
        """Makes what is no finite number in the KV cache zero, and leaves the rest."""
        kv_cache.clean(self.model_runner.kv_caches)
        return {}

    @answered
    def refitd_before_sleep(self) -> Answer:
        """Comes back when nobody reads the weights any more: falling asleep takes their memory away.

        Errors: `refit_failed` for a copy of them that takes too long, `collective_failed` for broadcasts into them.
        """
        self.refitd_state(look_again=False).wait_for_others()
        return {}

    @answered
    def refitd_require_room(self, tags: list[str] | None) -> Answer:
        """Refuses with `engine_error` where the device has too little free memory to wake what sleeps under `tags`."""
        require_room(self.device, tags)
        return {}

    @answered
    def refitd_keep_last(self, mode: str) -> Answer:
        """`host` starts to copy what is served now to host memory, in the background; `none` frees that memory.

        To be called once every rank has committed, so that all ranks keep the same version.
        """
        state = self.refitd_state()
        if mode == "none":
            state.keeper.drop()
        else:
            state.keeper.save(state.weights.kept_tensors())
        return state.keeper.status()

    @answered
    def refitd_keep_status(self) -> Answer:
        """`{state: off | saving | saved | failed, bytes}`."""
        return self.refitd_state().keeper.status()

    @answered
    def refitd_restore(self, mode: str = "sampled") -> Answer:
        """Puts back, bit for bit, what was kept: `{digest, digest_parts}`.

        Errors: `nothing_to_restore` and `collective_failed`, both before any write.
        """
        state = self.refitd_state()
        state.wait_for_others()
        state.keeper.restore(state.weights.kept_tensors())
        state.weights.after_write()
        state.forget_refit()
        return state.digest(DigestMode(mode))

    def refitd_wrote(self) -> bool:
        """Whether a refit that did not finish may have changed the engine's weights."""
        return self.refitd_kept_state is not None and self.refitd_kept_state.wrote

    def refitd_index(self) -> int:
        """Of this worker among those of all replicas."""
        parallel = self.vllm_config.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + self.rank)

    def refitd_state(self, *, look_again: bool = True, settled: bool = True) -> WorkerState:
        """Made at the first call, because vLLM calls no constructor; true to where the parameters lie now. Nothing that
        was prepared waits any more, if it has to be `settled`."""
        if self.refitd_kept_state is None:
            self.refitd_kept_state = WorkerState(EngineWeights(self.model_runner, self.vllm_config, self.device))
        if settled:
            self.refitd_kept_state.settle()
        if look_again:
            self.refitd_kept_state.weights.refresh()
        return self.refitd_kept_state


def _shapes(tensors: list[dict[str, Any]] | None) -> list[TensorShape] | None:
    return None if tensors is None else msgspec.convert(tensors, list[TensorShape])
