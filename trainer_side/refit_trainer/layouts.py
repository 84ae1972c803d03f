"""What a refit announces before its first bucket: the names, dtypes and shapes of everything that will come."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from refit_protocol.errors import ErrorCode
from refit_protocol.messages import Manifest, ManifestTensor
from refit_protocol.names import added_prefix, prefix_advice
from refit_protocol.tensors import DType, TensorShape
from refit_trainer.errors import LayoutMismatch, NotShareable

if TYPE_CHECKING:
    import torch

Layout: TypeAlias = dict[str, TensorShape]
NamedTensor: TypeAlias = "tuple[str, torch.Tensor]"

TAKES = "a refit takes a module, a mapping from names to tensors, or an iterable of (name, tensor) pairs"


def layout_of(tensors: Iterable[NamedTensor]) -> Layout:
    return {name: _shape(name, tensor) for name, tensor in tensors}


class MappingLayout:
    """The layout of a mapping, made anew only where it holds other names, types, shapes or dtypes than the last time:
    trainers refit from the same one again and again."""

    def __init__(self) -> None:
        self._seen: tuple[list[str], list[type]] = [], []
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._layout: Layout = {}

    @property
    def layout(self) -> Layout:
        """Of the last one."""
        return self._layout

    def of(self, weights: Mapping[str, torch.Tensor]) -> Layout:
        """Of a mapping that holds its tensors; not to be changed by the caller. Raises like `named_pairs`."""
        tensors = [*weights.values()]
        if not (self.is_named_alike(weights) and self.is_shaped_alike(tensors)):
            layout = layout_of(named_pairs(weights.items()))
            # Together: an interrupt may come at every call.
            self._seen, self._shapes, self._layout = _seen(weights), _shapes(tensors), layout
        return self._layout

    def is_named_alike(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether there are the names and the types of the last time, in their order."""
        return _seen(weights) == self._seen

    def is_shaped_alike(self, tensors: Sequence[torch.Tensor], part: slice = slice(None)) -> bool:
        """Whether this part of the tensors, which are named alike, has the shapes and dtypes of the last time; for all
        of them it takes as long as many a bucket's packing."""
        return _shapes(tensors[part]) == self._shapes[part]


def announced(specs: Iterable[TensorShape], only: Iterable[str] | None = None) -> Layout:
    """By name, with dtypes and shapes of the very types that are compared later: a dtype may be given by its name or as
    torch's, a shape as a list. Raises TypeError for anything else.

    `only`: names of those that will come; `LayoutMismatch` if one is not among them.
    """
    layout = {spec.name: spec for spec in map(_exact, specs)}
    if only is None:
        return layout
    names = frozenset(only)
    check_selection(names, layout)
    return {name: spec for name, spec in layout.items() if name in names}


def _exact(spec: TensorShape) -> TensorShape:
    if not isinstance(spec, TensorShape):
        raise TypeError(f"a spec is a TensorShape(name=..., dtype=..., shape=...), no {type(spec).__name__}")
    if type(spec.dtype) is DType and type(spec.shape) is tuple:
        return spec
    try:
        dtype = DType(str(spec.dtype).removeprefix("torch."))
        return TensorShape(name=spec.name, dtype=dtype, shape=tuple(map(int, spec.shape)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"the specs have no dtype and shape of {spec.name}: {error}") from None


def named_pairs(weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Raises TypeError, saying what a refit takes, for anything but pairs of a name and a tensor; `NotShareable` for a
    tensor without elements."""
    try:
        iterator = iter(weights)
    except TypeError:
        raise TypeError(f"{TAKES}, no {type(weights).__name__}") from None
    return map(_named_pair, iterator)


def _named_pair(item: NamedTensor) -> NamedTensor:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError(f"{TAKES}; this one yields a {type(item).__name__}")
    name, tensor = item
    # Not of NumPy: what is no torch.Tensor has no address to be read from. Importing this module imports no torch.
    if not isinstance(name, str) or not hasattr(tensor, "data_ptr"):
        raise TypeError(f"{TAKES}; this one yields a pair of {type(name).__name__} and {type(tensor).__name__}")
    _require_elements(name, tensor)
    return name, tensor


def _require_elements(name: str, tensor: torch.Tensor) -> None:
    """Else it is found out while it is packed, when the engine may have read others already."""
    if tensor.is_meta or str(tensor.layout) != "torch.strided":
        raise NotShareable(
            f"{name} has no elements to copy, it is on {tensor.device} and {tensor.layout}: give a dense tensor that "
            "has been loaded (offloading leaves parameters on meta)"
        )


def predicted_layout(manifest: Manifest, name: str, first: torch.Tensor) -> Layout:
    """What an iterator will yield, judged by its first tensor: all that the engine needs, in the trainer's dtype.

    Where the engine keeps a tensor in another dtype than most (a router's bias in float32), so does the trainer.
    """
    needed = {tensor.name: tensor for tensor in manifest.tensors}
    if name not in needed:
        prefixed = next((prefix for full in needed if (prefix := added_prefix([name], [full]))), None)
        raise LayoutMismatch(
            f"{name} is not a tensor of the engine's model{prefix_advice(prefixed)}", details={"unexpected": [name]}
        )
    engine_dtype, trainer_dtype = needed[name].dtype, dtype_of(first)
    return {
        tensor.name: TensorShape(
            name=tensor.name,
            dtype=trainer_dtype if tensor.dtype == engine_dtype else tensor.dtype,
            shape=tensor.shape,
        )
        for tensor in manifest.tensors
        if not _may_be_left_out(tensor) or tensor.name == name
    }


def without_aliases(tensors: Iterable[NamedTensor], manifest: Manifest, announced: Layout) -> Iterator[NamedTensor]:
    """Leaves out a tied tensor that is the very memory of the one it is tied to."""
    aliases = {tensor.name: tensor.alias_of for tensor in manifest.tensors if tensor.alias_of is not None}
    addresses: dict[str, int] = {}
    for name, tensor in tensors:
        if name in aliases.values():
            addresses[name] = tensor.data_ptr()
        if name in announced or addresses.get(aliases.get(name, "")) != tensor.data_ptr():
            yield name, tensor


def check_selection(only: Iterable[str], known: Container[str]) -> None:
    """Raises `LayoutMismatch` for names that nothing will be sent for, with the code and details that the daemon gives
    a refit in place."""
    unexpected = [name for name in only if name not in known]
    if unexpected:
        raise LayoutMismatch(
            f"only= names what is not among the tensors that will be sent: {', '.join(unexpected[:5])}",
            code=ErrorCode.MANIFEST_MISMATCH,
            details={"missing": [], "unexpected": unexpected, "shape": [], "dtype": []},
        )


def selected(tensors: Iterable[NamedTensor], names: Container[str]) -> Iterator[NamedTensor]:
    return ((name, tensor) for name, tensor in tensors if name in names)


def dtype_of(tensor: torch.Tensor) -> DType:
    """Raises `NotShareable` for dtypes that the wire does not know."""
    return _dtype_of(tensor.dtype)


@cache
def _dtype_of(dtype: torch.dtype) -> DType:
    name = str(dtype).removeprefix("torch.")
    try:
        return DType(name)
    except ValueError:
        raise NotShareable(f"dtype {name} cannot be sent, only {', '.join(DType)}") from None


def _may_be_left_out(tensor: ManifestTensor) -> bool:
    return tensor.optional or tensor.alias_of is not None


def _seen(weights: Mapping[str, torch.Tensor]) -> tuple[list[str], list[type]]:
    return [*weights], [type(tensor) for tensor in weights.values()]


def _shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _shape(name: str, tensor: torch.Tensor) -> TensorShape:
    if hasattr(tensor, "full_tensor"):
        raise NotShareable(f"{name} is sharded: pass its full_tensor()")
    return TensorShape(name=name, dtype=dtype_of(tensor), shape=tuple(tensor.shape))
