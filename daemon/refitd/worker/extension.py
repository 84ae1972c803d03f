"""The refit calls of a vLLM worker.

vLLM appends this class to the bases of its worker (`worker_extension_cls`), never calls its constructor, and imports this
module before the model loads. Arguments and answers are message-pack natives; no method raises (see `boundary`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from refit_protocol.digest import DigestMode, combine_parts
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.tensors import Segment, SourceTensor
from refitd.worker import commit
from refitd.worker.boundary import Answer, answered
from refitd.worker.cpu_patches import apply_cpu_patches
from refitd.worker.digest import DigestReader
from refitd.worker.sources import InplaceSource, Segments
from refitd.worker.weights import EngineWeights

apply_cpu_patches()


class _State:
    """What a worker keeps between calls."""

    def __init__(self, weights: EngineWeights) -> None:
        self.weights = weights
        self.sources: dict[str, InplaceSource] = {}
        self.digests = DigestReader(weights)
        self.wrote = False

    def source(self, source_id: str) -> InplaceSource:
        found = self.sources.get(source_id)
        if found is None:
            raise ProtocolError(ErrorCode.UNKNOWN_SOURCE, f"there is no open source {source_id}")
        return found

    def digest(self, mode: DigestMode) -> dict[str, Any]:
        if self.digests.plan is not self.weights.plan:
            self.digests = DigestReader(self.weights)
        parts = self.digests.parts(mode)
        return {"digest": combine_parts([parts]), "digest_parts": parts, "digest_mode": mode.value}


class RefitWorkerExtension:
    """Methods for `collective_rpc`; every attribute starts with `refitd_`, because the worker has its own."""

    refitd_state_of_worker: _State | None = None

    if TYPE_CHECKING:
        model_runner: Any
        vllm_config: Any
        device: torch.device
        rank: int

    @answered
    def refitd_describe(self) -> Answer:
        """`{rank, device, device_uuid, pid, dtype, bytes, manifest: [{name, dtype, shape, optional, alias_of, digested}]}`.

        `digested` says whether the tensor counts in the digest of what is served.
        """
        weights = self._refitd_state().weights
        parameters = weights.parameters.values()
        return {
            "rank": self.rank,
            "device": weights.device.type,
            "device_uuid": _device_uuid(weights.device),
            "pid": os.getpid(),
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "bytes": sum(parameter.nbytes for parameter in parameters),
            "manifest": [
                {**msgspec.to_builtins(expected), "digested": name in weights.plan.routes}
                for name, expected in weights.expected.items()
            ],
        }

    @answered
    def refitd_open_source(
        self,
        source_id: str,
        kind: str,
        segments: list[dict[str, Any]],
        tensors: list[dict[str, Any]],
        plan: str = "auto",
    ) -> Answer:
        """Maps the segments and prepares the copies: `{path, planned, loader_tensors: [{name, why}], bytes}`.

        Nothing of the engine is written. Errors: `manifest_mismatch`, `memory_unavailable`, `plan_required`, `unsupported`.
        """
        state = self._refitd_state()
        state.wrote = False
        described = msgspec.convert(tensors, list[SourceTensor])
        state.weights.check_manifest(described)
        mapped = Segments(msgspec.convert(segments, list[Segment]), state.weights.device)
        try:
            source = InplaceSource(mapped, described, planned=plan != "off")
            compiled = source.compiled(state.weights, None)
            if plan == "require" and compiled.loader_tensors:
                raise _plan_required(compiled.loader_tensors)
        except BaseException:
            mapped.close()
            raise
        self.refitd_close_source(source_id)
        state.sources[source_id] = source
        return {
            "path": compiled.path,
            "planned": len({named.tensor for named in compiled.copies}),
            "loader_tensors": _listed(compiled.loader_tensors),
            "bytes": compiled.program.size_bytes,
        }

    @answered
    def refitd_commit(
        self, source_id: str, only: list[str] | None = None, attest: str = "sampled", check_finite: bool = False
    ) -> Answer:
        """Writes the source's present values: `{bytes, tensors, path, loader_tensors, milliseconds, digest, digest_parts}`.

        Errors before the first byte: `unknown_source`, `manifest_mismatch`, `not_finite`; after it: `attest_failed`,
        `refit_failed`.
        """
        state = self._refitd_state()
        state.wrote = False
        clock = commit.Clock()
        weights, source = state.weights, state.source(source_id)
        compiled = commit.validate(weights, source, only)
        clock.lap("validate")
        if check_finite:
            commit.require_finite(weights, source, compiled)
            clock.lap("finite")
        state.wrote = True
        compiled = commit.write(weights, source, compiled)
        clock.lap("copy")
        commit.attest(compiled, commit.Attest(attest))
        digest = state.digest(DigestMode.FULL if attest == "full" else DigestMode.SAMPLED)
        clock.lap("attest")
        state.wrote = False
        return {
            "bytes": compiled.program.size_bytes,
            "tensors": len(compiled.names),
            "path": compiled.path,
            "loader_tensors": _listed(compiled.loader_tensors),
            "milliseconds": clock.milliseconds,
            **digest,
        }

    @answered
    def refitd_close_source(self, source_id: str) -> Answer:
        """Unmaps; closing a source that is not open does nothing."""
        source = self._refitd_state().sources.pop(source_id, None)
        if source is not None:
            source.close()
        return {"closed": source is not None}

    @answered
    def refitd_close_all(self) -> Answer:
        """Unmaps every source."""
        sources = self._refitd_state().sources
        while sources:
            sources.popitem()[1].close()
        return {}

    @answered
    def refitd_digest(self, mode: str = "sampled") -> Answer:
        """Of what is served now: `{digest, digest_parts, digest_mode}`."""
        return self._refitd_state().digest(DigestMode(mode))

    def refitd_wrote(self) -> bool:
        """Whether a refit that did not finish may have changed the engine's weights."""
        return self.refitd_state_of_worker is not None and self.refitd_state_of_worker.wrote

    def _refitd_state(self) -> _State:
        if self.refitd_state_of_worker is None:
            self.refitd_state_of_worker = _State(EngineWeights(self.model_runner, self.vllm_config, self.device))
        return self.refitd_state_of_worker


def _device_uuid(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _listed(loader_tensors: dict[str, str] | Any) -> list[dict[str, str]]:
    return [{"name": name, "why": why} for name, why in loader_tensors.items()]


def _plan_required(loader_tensors: Any) -> ProtocolError:
    message = f"{len(loader_tensors)} tensors cannot be planned, and the plan is required"
    return ProtocolError(ErrorCode.PLAN_REQUIRED, message, loader_tensors=_listed(loader_tensors))
