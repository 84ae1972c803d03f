"""Modules whose parameters lie in exported memory: opened once by a daemon, then read in place at every refit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any, TypeVar
from weakref import ref

import torch

from refit_protocol.tensors import SourceTensor, row_major_strides
from refit_trainer.backends import ExportedMemory, backend_for
from refit_trainer.errors import NotShareable
from refit_trainer.layouts import TAKES, dtype_of
from refit_trainer.names import bare_module, checkpoint_tensors, own_tensors
from refit_trainer.shards import gathered_from, is_sharded, local_part, shard_of

_Module = TypeVar("_Module", bound=torch.nn.Module)
_Holder = TypeVar("_Holder")
_Part = TypeVar("_Part")

# In the module's own dictionary. A registry, even a weak one, would keep each module whose children refer back to it.
_EXPORT = "_refit_export"


class SharedModule:
    """The export of one module: `memory` and the checkpoint tensors in it, or this rank's parts of them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = ref(module)
        tensors = own_tensors(module)
        _check_plain(tensors)
        self.device = _device(tensors)
        self.sharded = any(is_sharded(tensor) for _, tensor in tensors)
        # Each object once: one buffer may be registered by several modules.
        parts = {id(part): part for part in [*(local_part(tensor) for _, tensor in tensors), *gathered_from(module)]}
        self.memory: ExportedMemory = backend_for(self.device.type).share([*parts.values()])
        self.tensors = [_described(name, tensor, self.memory) for name, tensor in checkpoint_tensors(module).items()]
        self._holders, self._keys, self._addresses = _columns(_tensor_slots(module))
        self._parents, self._child_keys, self._children = _columns(_module_slots(module))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copies of the module, in memory or in a file, have None in its place: their parameters lie elsewhere."""
        return type(None), ()

    def is_of(self, module: torch.nn.Module) -> bool:
        """False where somebody made `module` of the attributes of another."""
        return self._module() is module

    def require_in_place(self) -> None:
        """Raises `NotShareable` if parameters moved since."""
        if (part := self.changed_part()) is not None:
            raise NotShareable(f"{part} was replaced or moved since share_parameters(): call share_parameters() again")

    def changed_part(self) -> str | None:
        """The name of a part that no longer is where it was exported, None if all are. Called before every refit."""
        # First, since it lets the client's loop go on meanwhile.
        memory_is_in_place = self.memory.is_in_place()
        if self._is_in_place():
            return None if memory_is_in_place else "the memory under the parameters"
        for holder, key, data_ptr in zip(self._holders, self._keys, self._addresses, strict=True):
            tensor = holder.get(key)
            if tensor is None or local_part(tensor).data_ptr() != data_ptr:
                return self._name_of(holder, key)
        for modules, key, child in zip(self._parents, self._child_keys, self._children, strict=True):
            if modules.get(key) is not child:
                return self._name_of(modules, key)
        return None

    def _name_of(self, holder: dict[str, Any], key: str) -> str:
        """Of what one of the module's dictionaries holds, or has held; the key alone where that is no longer its."""
        module = self._module()
        owners = () if module is None else module.named_modules()
        for path, owner in owners:
            if any(held is holder for held in (owner._parameters, owner._buffers, owner._modules)):
                return f"{path}.{key}" if path else key
        return key

    def _is_in_place(self) -> bool:
        """Without a loop in Python where the tensors are whole: modules have thousands of parts."""
        tensors: list[Any] = list(map(dict.get, self._holders, self._keys))
        parts = map(local_part, tensors) if self.sharded else tensors
        try:
            addresses = list(map(torch.Tensor.data_ptr, parts))
        except TypeError:  # of a parameter that is gone
            return False
        children = map(dict.get, self._parents, self._child_keys)
        return addresses == self._addresses and all(map(is_, children, self._children))


def share_parameters(module: _Module) -> _Module:
    """Moves the parameters and persistent buffers of `module` into memory that a daemon on this machine can read.

    Every Parameter object stays the same (optimisers, ties and hooks go on working), its data moves once; on the CPU
    into one sealed memfd. Steps in place are seen by the next refit. Call it after the module is on its device and
    in its dtype, and before the first refit. Of a sharded module (FSDP2, tensor parallel: `DTensor`) it moves what lies
    on this rank; then call it, and every refit, on all ranks. Raises `NotShareable` for parameters that are no plain
    memory, on several kinds of devices, sharded in a way that leaves no box of elements here, or, where they have to be
    moved, parts of a flat buffer that something else holds (Megatron, DeepSpeed, Apex).
    """
    _require_module(module, "share_parameters")
    bare = bare_module(module)
    known = _export_of(bare)
    if known is None or known.changed_part() is not None:
        bare.__dict__[_EXPORT] = SharedModule(bare)
    return module


def unshare_parameters(module: torch.nn.Module) -> None:
    """Closes the export of `module`, if it has one; its parameters stay valid where they are."""
    _require_module(module, "unshare_parameters")
    bare = bare_module(module)
    shared = _export_of(bare)
    if shared is not None:
        del bare.__dict__[_EXPORT]
        shared.memory.close()


def shared_module(module: torch.nn.Module) -> SharedModule | None:
    """The export of `module`, None if it has none; raises `NotShareable` if parameters moved since."""
    shared = shared_before(module)
    if shared is not None:
        shared.require_in_place()
    return shared


def shared_by_one(weights: object) -> SharedModule:
    """The export of a module that lies in this process alone. Raises `NotShareable` for other weights, TypeError for
    what are none."""
    if not isinstance(weights, torch.nn.Module | Iterable):
        raise TypeError(f"{TAKES}, no {type(weights).__name__}")
    shared = shared_module(weights) if isinstance(weights, torch.nn.Module) else None
    if shared is None or shared.sharded:
        raise NotShareable(
            "only a module that was shared by one process can be prepared (share_parameters): use refit()"
        )
    return shared


def shared_before(module: torch.nn.Module) -> SharedModule | None:
    """The same without a look at the parameters, which takes some tenths of a millisecond."""
    return _export_of(bare_module(module))


def _export_of(bare: torch.nn.Module) -> SharedModule | None:
    shared: SharedModule | None = bare.__dict__.get(_EXPORT)
    return shared if shared is not None and shared.is_of(bare) else None


def _require_module(module: object, call: str) -> None:
    if not isinstance(module, torch.nn.Module):
        named = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise TypeError(f"{call}() takes a torch.nn.Module, not {named}")


def _check_plain(tensors: list[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        kind = type(local_part(tensor).data)
        if kind is not torch.Tensor:
            raise NotShareable(f"{name} is a {kind.__name__}, not plain memory: pass full tensors to refit() instead")


def _device(tensors: list[tuple[str, torch.Tensor]]) -> torch.device:
    """One on which the parameters lie; the others are of its kind."""
    devices = {tensor.device for _, tensor in tensors}
    if len(types := {device.type for device in devices}) != 1:
        raise NotShareable(f"the parameters have to lie on one kind of device, not on {sorted(types) or 'none'}")
    return devices.pop()


def _described(name: str, tensor: torch.Tensor, memory: ExportedMemory) -> SourceTensor:
    shard, part = shard_of(name, tensor), local_part(tensor)
    place = memory.locate(part) if part.numel() else (0, 0)
    assert place is not None, f"{name} was shared a moment ago"
    shape, strides = tuple(part.shape), tuple(part.stride())
    row_major = part.numel() == 0 or strides == row_major_strides(shape)
    return SourceTensor(
        name=name,
        dtype=dtype_of(part),
        shape=shape,
        segment=place[0],
        offset_bytes=place[1],
        strides=None if row_major else strides,
        shard=shard,
    )


def _columns(rows: Iterator[tuple[_Holder, str, _Part]]) -> tuple[list[_Holder], list[str], list[_Part]]:
    table = list(rows)
    return [row[0] for row in table], [row[1] for row in table], [row[2] for row in table]


def _tensor_slots(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, int]]:
    for owner in module.modules():
        persistent = {
            key: value for key, value in owner._buffers.items() if key not in owner._non_persistent_buffers_set
        }
        for holder, tensors in ((owner._parameters, owner._parameters), (owner._buffers, persistent)):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield holder, key, local_part(tensor).data_ptr()


def _module_slots(
    module: torch.nn.Module,
) -> Iterator[tuple[dict[str, Any], str, torch.nn.Module]]:
    for owner in module.modules():
        for key, child in owner._modules.items():
            if child is not None:
                yield owner._modules, key, child
