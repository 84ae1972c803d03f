"""The engine's life: load, adapters, caches, sleep."""

from __future__ import annotations

from typing import Literal

from refit_protocol.messages.kinds import Command, Fact, InflightPolicy, SleepTag
from refit_protocol.messages.sessions import ModelInfo

__all__ = [
    "AdapterLoaded",
    "AdapterUnloaded",
    "LoadAdapter",
    "LoadModel",
    "ModelLoaded",
    "PrefixCacheReset",
    "ResetPrefixCache",
    "Sleep",
    "SleepStateChanged",
    "UnloadAdapter",
    "WakeUp",
]


class LoadModel(Command, frozen=True, kw_only=True):
    """Starts the load that `defer_load` put off; the reply comes when the model can be served."""


class ModelLoaded(Fact, frozen=True, kw_only=True):
    model: ModelInfo
    load_seconds: float


class LoadAdapter(Command, frozen=True, kw_only=True):
    """Makes a LoRA adapter known as `name`, instead of one that has the name; `path` is on the daemon's machine."""

    name: str
    path: str


class AdapterLoaded(Fact, frozen=True, kw_only=True):
    name: str


class UnloadAdapter(Command, frozen=True, kw_only=True):
    """No new request may name it; those under way go on with it."""

    name: str


class AdapterUnloaded(Fact, frozen=True, kw_only=True):
    name: str


class ResetPrefixCache(Command, frozen=True, kw_only=True):
    pass


class PrefixCacheReset(Fact, frozen=True, kw_only=True):
    pass


class Sleep(Command, frozen=True, kw_only=True):
    """Level 1 frees the KV cache and moves weights to host memory; level 2 drops them: then only a full refit helps."""

    level: Literal[1, 2] = 1
    policy: InflightPolicy = "finish"


class WakeUp(Command, frozen=True, kw_only=True):
    """`tags` None wakes everything."""

    tags: list[SleepTag] | None = None


class SleepStateChanged(Fact, frozen=True, kw_only=True):
    level: int
    asleep_tags: list[SleepTag]
    servable: bool


Commands = LoadModel | LoadAdapter | UnloadAdapter | ResetPrefixCache | Sleep | WakeUp
Facts = ModelLoaded | AdapterLoaded | AdapterUnloaded | PrefixCacheReset | SleepStateChanged
