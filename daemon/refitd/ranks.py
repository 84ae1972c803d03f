"""What the workers of one engine answer, each for its own part of the model, as one answer for all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from refit_protocol.digest import combine_parts
from refit_protocol.messages import ManifestTensor, RefitPath, UnplannedTensor


def combine_manifests(workers: Sequence[Mapping[str, Any]]) -> list[ManifestTensor]:
    """Pipeline stages have no use for each other's layers: a tensor is optional only where no worker needs it."""
    combined: dict[str, ManifestTensor] = {}
    for worker in workers:
        for tensor in msgspec.convert(worker["manifest"], list[ManifestTensor]):
            known = combined.get(tensor.name)
            if known is None or (known.optional and not tensor.optional):
                combined[tensor.name] = tensor
    return list(combined.values())


def combine_unplanned(answers: Iterable[Mapping[str, Any]]) -> list[UnplannedTensor]:
    reasons = {tensor["name"]: tensor["why"] for answer in answers for tensor in answer["loader_tensors"]}
    return [UnplannedTensor(name=name, why=why) for name, why in reasons.items()]


def combine_paths(answers: Iterable[Mapping[str, Any]]) -> RefitPath:
    paths: set[RefitPath] = {answer["path"] for answer in answers}
    return paths.pop() if len(paths) == 1 else "mixed"


def combine_digests(answers: Iterable[Mapping[str, Any]]) -> str | None:
    """The digest over all workers, None where none was asked for; raises `attest_failed` where replicas differ."""
    parts = [answer["digest_parts"] for answer in answers if answer["digest"] is not None]
    return combine_parts(parts) if parts else None
