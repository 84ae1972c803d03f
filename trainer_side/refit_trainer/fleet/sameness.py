"""Whether the daemons of a fleet serve one model, and the same weights; decides without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, TypeVar

from refit_protocol.messages import Manifest, Status
from refit_protocol.states import EngineState
from refit_trainer.errors import OtherModel, RefitdError

RequireSame: TypeAlias = Literal["weights", "model", "nothing"]
# The shape of each tensor of a checkpoint, by name. Its dtype may differ: engines of unlike precision serve one model.
Model: TypeAlias = Mapping[str, tuple[int, ...]]

_Value = TypeVar("_Value")


def model_of(manifest: Manifest) -> Model:
    return {tensor.name: tensor.shape for tensor in manifest.tensors}


def usual(values: Mapping[str, _Value]) -> _Value:
    """What most have; among equally many the first one's."""
    return max(values.values(), key=lambda value: sum(value == other for other in values.values()))


def other_model(name: str, model: Model, expected: Model) -> OtherModel:
    """Says what tells it from the others."""
    return OtherModel(f"serves another model, {name}: {_difference(model, expected)}")


def other_weights(statuses: Mapping[str, Status]) -> dict[str, RefitdError]:
    """Those that serve a version under which most serve other weights, where digests can be compared at all."""
    alike: dict[object, dict[str, str]] = {}
    for endpoint, status in statuses.items():
        # While a refit is under way, version and digest may be those of different weights.
        if status.digest is not None and status.model is not None and status.state is EngineState.READY:
            comparable = status.version, status.digest_mode, status.model.dtype
            alike.setdefault(comparable, {})[endpoint] = status.digest
    return {
        endpoint: RefitdError(f"serves other weights than the others as version {statuses[endpoint].version}")
        for digests in alike.values()
        for endpoint, digest in digests.items()
        if digest != usual(digests)
    }


def _difference(model: Model, expected: Model) -> str:
    for name, shape in expected.items():
        if name not in model:
            return f"it has no tensor {name!r}, the others have"
        if model[name] != shape:
            return f"its {name!r} has shape {list(model[name])}, the others' {list(shape)}"
    more = next(name for name in model if name not in expected)
    return f"it has a tensor {more!r}, the others have not"
