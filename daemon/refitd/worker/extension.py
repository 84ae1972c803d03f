"""The refit calls of a vLLM worker.

vLLM appends this class to the bases of its worker (`worker_extension_cls`), never calls its constructor, and imports
this module before the model loads. Arguments and answers are message-pack natives; no method raises (see `boundary`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from refit_protocol.digest import DigestMode, combine_parts
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.rendezvous import collective_failed
from refit_protocol.tensors import BucketPiece, Segment, SourceTensor, TensorShape
from refitd.worker import commit
from refitd.worker.adapters import load_adapter
from refitd.worker.attest import check_finite as require_finite
from refitd.worker.boundary import Answer, answered
from refitd.worker.buckets import Announcement, BucketRefit, BucketSource, announce
from refitd.worker.checkpoint import Checkpoint, check_architecture
from refitd.worker.collective import CollectiveSource, GroupAddress, Joining
from refitd.worker.commit import Attest, Clock
from refitd.worker.cpu_patches import apply_cpu_patches
from refitd.worker.digest import DigestReader
from refitd.worker.group_end import GroupEnd
from refitd.worker.keep import Keeper
from refitd.worker.line import open_line
from refitd.worker.loader_progress import watch_loader
from refitd.worker.memory import device_uuid
from refitd.worker.parts import whole_tensor
from refitd.worker.proof import prove_by_reload
from refitd.worker.reload import Reload
from refitd.worker.sources import InplaceSource, Segments
from refitd.worker.waking import require_room
from refitd.worker.weights import EngineWeights

KEEP_TIMEOUT_SECONDS = 60.0
# How long one call receives broadcasts before it shows that the engine is alive.
RECEIVE_SECONDS = 0.2
# How long the end of broadcasts that were broken off is waited for.
END_SECONDS = 10.0

apply_cpu_patches()
watch_loader()


class _State:
    """What a worker keeps between calls. `wrote`: a refit that has not finished may have changed the engine."""

    def __init__(self, weights: EngineWeights) -> None:
        self.weights = weights
        self.sources: dict[int | str, InplaceSource | BucketSource] = {}
        self.joining: dict[int | str, Joining] = {}
        self.refit: BucketRefit | None = None
        self.keeper = Keeper()
        self.wrote = False
        self._endings: list[GroupEnd] = []
        self._digests = DigestReader(weights)

    def before_write(self) -> None:
        """Whoever still reads the weights as they are, or writes them, is waited for."""
        self.wait_for_others()
        self.wrote = True

    def wait_for_others(self) -> None:
        """Raises `collective_failed` where the broadcasts of a refit that failed may still arrive."""
        self._endings = [end for end in self._endings if not end.wait(END_SECONDS)]
        if self._endings:
            raise collective_failed("broadcasts of an earlier refit could not be ended, and may still be written")
        self.keeper.wait(KEEP_TIMEOUT_SECONDS)
        if self.weights.device.type == "cuda":
            # The last step of the engine, on whichever of its streams.
            torch.cuda.synchronize(self.weights.device)

    def inplace(self, source_id: int | str) -> InplaceSource:
        source = self.sources.get(source_id)
        if not isinstance(source, InplaceSource):
            raise ProtocolError(ErrorCode.UNKNOWN_SOURCE, f"there is no open in-place source {source_id}")
        return source

    def buckets(self, source_id: int | str) -> BucketSource:
        source = self.sources.get(source_id)
        if not isinstance(source, BucketSource):
            raise ProtocolError(ErrorCode.UNKNOWN_SOURCE, f"there is no open bucket source {source_id}")
        return source

    def refit_under_way(self) -> BucketRefit:
        if self.refit is None:
            raise ProtocolError(ErrorCode.UNKNOWN_REFIT, "no bucket refit is under way")
        return self.refit

    def joined(self, source_id: int | str, *, planned: bool) -> CollectiveSource | None:
        """The source, once its group is complete. Raises what joining it failed with."""
        before = self.sources.get(source_id)
        if isinstance(before, CollectiveSource):
            return before
        joining = self.joining.get(source_id)
        if joining is None:
            raise ProtocolError(ErrorCode.UNKNOWN_SOURCE, f"nobody is joining a group for source {source_id}")
        group = joining.group()
        if group is None:
            return None
        source = CollectiveSource(group, self.weights.device, planned)
        del self.joining[source_id]
        self.sources[source_id] = source
        return source

    def close(self, source_id: int | str) -> bool:
        joining = self.joining.pop(source_id, None)
        if joining is not None:
            joining.close()
        source = self.sources.pop(source_id, None)
        if source is None:
            return False
        if self.refit is not None and self.refit.source is source:
            self.refit = None
        source.close()
        if isinstance(source, CollectiveSource) and source.ending is not None:
            self._endings += [] if source.ending.wait(END_SECONDS) else [source.ending]
        return True

    def digest(self, mode: DigestMode) -> dict[str, Any]:
        return _combined(self._reader().parts(mode))

    def begin_digest(self, how: Attest) -> Callable[[], dict[str, Any]]:
        """Enqueues the reads of `attested_digest`."""
        if how is Attest.OFF:
            return lambda: {"digest": None, "digest_parts": {}}
        parts = self._reader().begin(DigestMode(how.value))
        return lambda: _combined(parts())

    def attested_digest(self, how: Attest) -> dict[str, Any]:
        return self.begin_digest(how)()

    def _reader(self) -> DigestReader:
        if self._digests.plan is not self.weights.plan:
            self._digests = DigestReader(self.weights)
        return self._digests


class RefitWorkerExtension:
    """Methods for `collective_rpc`; every attribute starts with `refitd_`, because the worker has its own."""

    refitd_kept_state: _State | None = None

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
    ) -> Answer:
        """Maps the segments: `{path, planned, loader_tensors: [{name, why}], bytes}`; nothing of the engine is written.

        Errors: `manifest_mismatch`, `memory_unavailable`, `plan_required`, `unsupported`.
        """
        state = self.refitd_state()
        state.wrote = False
        described = msgspec.convert(tensors, list[SourceTensor])
        if kind == "inplace":
            state.weights.check_manifest([whole_tensor(tensor) for tensor in described])
        # Of what several ranks hold a worker reads its part, and what lies on other devices it may not even reach.
        of_ranks = len({tensor.name for tensor in described}) < len(described)
        mapped = Segments(msgspec.convert(segments, list[Segment]), state.weights.device, at_need=of_ranks)
        try:
            source, answer = _opened(state.weights, kind, mapped, described, plan)
        except BaseException:
            mapped.close()
            raise
        state.close(source_id)
        state.sources[source_id] = source
        return answer

    @answered
    def refitd_close_source(self, source_id: int | str) -> Answer:
        """Unmaps, and forgets a bucket refit under way; closing what is not open does nothing.

        Broadcasts that are being received are ended; while that cannot be done nothing may be written or put back.
        """
        return {"closed": self.refitd_state().close(source_id)}

    @answered
    def refitd_close_all(self) -> Answer:
        """Unmaps every source."""
        state = self.refitd_state()
        for source_id in [*state.sources, *state.joining]:
            state.close(source_id)
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
            return {"path": _allowed(announced, plan).path}
        inplace = state.inplace(source_id)
        inplace.wait_until_written()
        compiled = commit.validate(state.weights, inplace, only)
        if check_finite:
            commit.require_finite(state.weights, inplace, compiled)
        return {"path": compiled.path}

    # --- collective sources -------------------------------------------------------------------------------------------

    @answered
    def refitd_join(self, source_id: int | str, where: dict[str, Any], first_rank: int) -> Answer:
        """Sets out to join a trainer's group, in the background; `refitd_joined` says how it went."""
        parallel = self.vllm_config.parallel_config
        index = parallel.data_parallel_index * parallel.world_size + self.rank
        address = msgspec.convert({**where, "rank": first_rank + index}, GroupAddress)
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
        refit = state.refit_under_way()
        source = refit.source
        assert isinstance(source, CollectiveSource), "the daemon knows the kinds of its sources"
        reception = source.reception
        if reception is None or reception.refit is not refit:
            state.wait_for_others()
            reception = source.begin(state.weights, refit)
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
    ) -> Answer:
        """Writes the present values: `{bytes, tensors, path, loader_tensors, milliseconds, digest, digest_parts}`.

        Errors before the first byte: `unknown_source`, `manifest_mismatch`, `plan_required`, `not_finite`; after it:
        `attest_failed`, `refit_failed`.
        """
        state = self.refitd_state()
        state.wrote = False
        clock, weights, source = Clock(), state.weights, state.inplace(source_id)
        source.wait_until_written()
        clock.lap("wait")
        compiled = commit.validate(weights, source, only)
        if check_finite:
            commit.require_finite(weights, source, compiled)
        clock.lap("validate")
        state.before_write()
        compiled = commit.write(weights, source, compiled)
        # What can be enqueued behind the copy does not have to wait for it.
        try:
            check = commit.begin_attest(compiled, Attest(attest))
            digest = state.begin_digest(Attest(attest))
        finally:
            compiled.program.wait()
        clock.lap("copy")
        check()
        answer = digest()
        clock.lap("attest")
        state.wrote = False
        return {
            "bytes": compiled.size_bytes,
            "tensors": len(compiled.names),
            "path": compiled.path,
            "loader_tensors": _listed(compiled.loader_tensors),
            "milliseconds": clock.milliseconds,
            **answer,
        }

    # --- buckets ------------------------------------------------------------------------------------------------------

    @answered
    def refitd_begin(
        self, source_id: int | str, tensors: list[dict[str, Any]] | None, partial: bool = False, plan: str = "auto"
    ) -> Answer:
        """Validates what will come, all of it unless `partial`: `{path, loader_tensors}`. Nothing is written.

        Without `tensors` the same as the last time.
        """
        state = self.refitd_state()
        state.wrote = False
        source = state.buckets(source_id)
        announced = _allowed(
            source.announce_next(state.weights, _shapes(tensors), partial=partial, planned=plan != "off"), plan
        )
        state.refit = BucketRefit(state.weights, source, announced)
        return {"path": announced.path, "loader_tensors": _listed(announced.loader_tensors)}

    @answered
    def refitd_apply_bucket(self, bucket: int, pieces: list[dict[str, Any]]) -> Answer:
        """Copies a bucket into the engine, after which it may be overwritten: `{bytes}`.

        Errors: `invalid_descriptor` for elements that came before; this bucket has then not been read. Any error ends
        the refit: buckets that were sent behind this one are not written any more.
        """
        # Nothing moves while the gate is shut, and it has been since the refit was begun.
        state = self.refitd_state(look_again=False)
        refit = state.refit_under_way()
        layout = tuple(msgspec.convert(pieces, list[BucketPiece]))
        try:
            refit.accept(layout)
            refit.wait_until_written(bucket)
            state.before_write()
            return {"bytes": refit.copy(bucket, layout)}
        except BaseException:
            state.refit = None
            raise

    @answered
    def refitd_finish(self, attest: str = "sampled", check_finite: bool = False) -> Answer:
        """Completes a bucket refit; answers like `refitd_commit`.

        Errors: `manifest_mismatch` for tensors that did not come whole, `not_finite`, `refit_failed`.
        """
        state, clock = self.refitd_state(), Clock()
        refit = state.refit_under_way()
        refit.require_complete()
        clock.lap("validate")
        state.before_write()
        return _completed(state, refit, clock, Attest(attest), finite=check_finite)

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
        check_architecture(Path(directory), self.vllm_config.model_config.architectures)
        with Checkpoint(Path(directory)) as checkpoint:
            announced = _announced(state.weights, checkpoint, plan)
            return {"path": announced.path, "tensors": len(checkpoint.tensors), "bytes": checkpoint.size_bytes}

    @answered
    def refitd_reload(
        self, directory: str, plan: str = "auto", attest: str = "sampled", check_finite: bool = False
    ) -> Answer:
        """Loads the checkpoint in `directory`; answers like `refitd_commit`.

        Errors before the first byte: those of `refitd_check_checkpoint`, `not_finite`; after it: `invalid_checkpoint`
        for a file that was changed meanwhile, `refit_failed`.
        """
        state, clock = self.refitd_state(), Clock()
        state.wrote, state.refit = False, None
        with Checkpoint(Path(directory)) as checkpoint:
            reload = Reload(state.weights, checkpoint, _announced(state.weights, checkpoint, plan))
            if check_finite:
                reload.check_finite()
            clock.lap("validate")
            for pieces in reload.filled():
                state.before_write()
                reload.copy(pieces)
        reload.refit.require_complete()
        return _completed(state, reload.refit, clock, Attest(attest), finite=False)

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
        return {"unloaded": bool(self.model_runner.remove_lora(number))}

    @answered
    def refitd_cache_is_finite(self) -> Answer:
        """`{finite}`: whether no block of the KV cache holds NaN or infinity."""
        caches = [cache for cache in self.model_runner.kv_caches if cache.is_floating_point()]
        # Both survive a sum, which takes no memory of its own.
        return {"finite": all(bool(cache.sum(dtype=torch.float32).isfinite()) for cache in caches)}

    @answered
    def refitd_clean_cache(self) -> Answer:
        """Makes what is no finite number in the KV cache zero, and leaves the rest: masked or not, one NaN in a block
        makes NaN of every attention that reads the block.
        """
        for cache in self.model_runner.kv_caches:
            if cache.is_floating_point():
                torch.nan_to_num_(cache, nan=0.0, posinf=0.0, neginf=0.0)
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
        return _keep_status(state.keeper)

    @answered
    def refitd_keep_status(self) -> Answer:
        """`{state: off | saving | saved | failed, bytes}`."""
        return _keep_status(self.refitd_state().keeper)

    @answered
    def refitd_restore(self, mode: str = "sampled") -> Answer:
        """Puts back, bit for bit, what was kept: `{digest, digest_parts}`.

        Errors: `nothing_to_restore` and `collective_failed`, both before any write.
        """
        state = self.refitd_state()
        state.wait_for_others()
        state.keeper.restore(state.weights.kept_tensors())
        state.weights.after_write()
        state.wrote, state.refit = False, None
        return state.digest(DigestMode(mode))

    def refitd_wrote(self) -> bool:
        """Whether a refit that did not finish may have changed the engine's weights."""
        return self.refitd_kept_state is not None and self.refitd_kept_state.wrote

    def refitd_state(self, *, look_again: bool = True) -> _State:
        """Made at the first call, because vLLM calls no constructor; true to where the parameters lie now."""
        if self.refitd_kept_state is None:
            self.refitd_kept_state = _State(EngineWeights(self.model_runner, self.vllm_config, self.device))
        if look_again:
            self.refitd_kept_state.weights.refresh()
        return self.refitd_kept_state


def _opened(
    weights: EngineWeights, kind: str, mapped: Segments, tensors: list[SourceTensor], plan: str
) -> tuple[InplaceSource | BucketSource, Answer]:
    if kind == "bucket":
        loader_tensors = _listed(weights.plan.loader_only)
        path = "mixed" if loader_tensors else "plan"
        answer = {"path": path, "planned": len(weights.plan.routes), "loader_tensors": loader_tensors, "bytes": 0}
        return BucketSource(mapped, planned=plan != "off"), answer
    source = InplaceSource(mapped, tensors, planned=plan != "off")
    compiled = source.compiled(weights, None)
    if plan == "require" and compiled.loader_tensors:
        raise _plan_required(compiled.loader_tensors)
    return source, {
        "path": compiled.path,
        "planned": len({named.tensor for named in compiled.copies}),
        "loader_tensors": _listed(compiled.loader_tensors),
        "bytes": compiled.size_bytes,
    }


def _announced(weights: EngineWeights, checkpoint: Checkpoint, plan: str) -> Announcement:
    announced = announce(weights, list(checkpoint.tensors.values()), partial=False, planned=plan != "off")
    return _allowed(announced, plan)


def _shapes(tensors: list[dict[str, Any]] | None) -> list[TensorShape] | None:
    return None if tensors is None else msgspec.convert(tensors, list[TensorShape])


def _allowed(announced: Announcement, plan: str) -> Announcement:
    if plan == "require" and announced.loader_tensors:
        raise _plan_required(announced.loader_tensors)
    return announced


def _completed(state: _State, refit: BucketRefit, clock: Clock, attest: Attest, *, finite: bool) -> Answer:
    """All pieces have been written: what follows from them is renewed, proven and digested."""
    weights = state.weights
    refit.load_staged()
    if weights.proven_plan is not weights.plan:
        prove_by_reload(weights)
    weights.after_write()
    clock.lap("copy")
    if finite:
        require_finite((name, parameter, parameter.dtype) for name, parameter in weights.model.named_parameters())
    digest = state.attested_digest(attest)
    clock.lap("attest")
    state.wrote, state.refit = False, None
    return {
        "bytes": refit.size_bytes,
        "tensors": len(refit.announced.tensors),
        "path": refit.announced.path,
        "loader_tensors": _listed(refit.announced.loader_tensors),
        "milliseconds": clock.milliseconds,
        **digest,
    }


def _combined(parts: dict[str, str]) -> dict[str, Any]:
    return {"digest": combine_parts([parts]), "digest_parts": parts}


def _keep_status(keeper: Keeper) -> Answer:
    return {"state": keeper.state.value, "bytes": keeper.size_bytes}


def _listed(loader_tensors: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "why": why} for name, why in loader_tensors.items()]


def _plan_required(loader_tensors: Mapping[str, str]) -> ProtocolError:
    message = f"{len(loader_tensors)} tensors cannot be planned, and the plan is required"
    return ProtocolError(ErrorCode.PLAN_REQUIRED, message, loader_tensors=_listed(loader_tensors))
