"""What may happen when, as tables: the engine, a session, the writer. No sockets, tensors or clocks here.

A transition that is not in a table is not allowed; `step` says so with a typed error.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from refit_protocol.errors import ErrorCode, ProtocolError


class EngineState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    REFITTING = "refitting"
    TORN = "torn"
    ASLEEP = "asleep"
    DRAINING = "draining"
    DEAD = "dead"


class EngineEvent(StrEnum):
    LOAD_STARTED = "load started"
    LOADED = "loaded"
    REFIT_STARTED = "refit started"
    REFIT_COMMITTED = "refit committed"
    REFIT_REFUSED = "refit refused before the first write"
    REFIT_TORN = "refit failed after the first write"
    RESTORED = "last committed weights restored"
    FELL_ASLEEP = "fell asleep"
    WOKE = "woke"
    DRAIN_STARTED = "drain started"
    DIED = "died"


_S, _E = EngineState, EngineEvent
ENGINE_TRANSITIONS: dict[tuple[EngineState, EngineEvent], EngineState] = {
    (_S.UNLOADED, _E.LOAD_STARTED): _S.LOADING,
    (_S.LOADING, _E.LOADED): _S.READY,
    (_S.READY, _E.REFIT_STARTED): _S.REFITTING,
    (_S.TORN, _E.REFIT_STARTED): _S.REFITTING,
    (_S.REFITTING, _E.REFIT_COMMITTED): _S.READY,
    (_S.REFITTING, _E.REFIT_REFUSED): _S.READY,
    (_S.REFITTING, _E.REFIT_TORN): _S.TORN,
    (_S.REFITTING, _E.RESTORED): _S.READY,
    (_S.TORN, _E.RESTORED): _S.READY,
    (_S.READY, _E.FELL_ASLEEP): _S.ASLEEP,
    (_S.ASLEEP, _E.WOKE): _S.READY,
    (_S.UNLOADED, _E.DRAIN_STARTED): _S.DRAINING,
    (_S.LOADING, _E.DRAIN_STARTED): _S.DRAINING,
    (_S.READY, _E.DRAIN_STARTED): _S.DRAINING,
    (_S.TORN, _E.DRAIN_STARTED): _S.DRAINING,
    (_S.ASLEEP, _E.DRAIN_STARTED): _S.DRAINING,
    **{(state, _E.DIED): _S.DEAD for state in EngineState},
}

# Why a request that needs a servable engine is refused in each state; ready and refitting (wait at the gate) are absent.
NOT_SERVABLE: dict[EngineState, tuple[ErrorCode, str]] = {
    _S.UNLOADED: (ErrorCode.LOADING, "the model is not loaded yet: send LoadModel"),
    _S.LOADING: (ErrorCode.LOADING, "the model is still loading: ask Status for its progress"),
    _S.TORN: (ErrorCode.TORN, "a refit failed half-way: commit a full refit, or send RestoreWeights"),
    _S.ASLEEP: (ErrorCode.ASLEEP, "the engine is asleep: send WakeUp first"),
    _S.DRAINING: (ErrorCode.DRAINING, "the daemon is shutting down: connect to another, or wait for its restart"),
    _S.DEAD: (ErrorCode.ENGINE_DEAD, "the engine has died: the daemon exits so that its supervisor restarts it"),
}

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


def step(table: Mapping[tuple[State, Event], State], state: State, event: Event) -> State:
    """The state after `event`; raises `not_allowed_now` where the table has none."""
    after = table.get((state, event))
    if after is None:
        raise ProtocolError(
            ErrorCode.NOT_ALLOWED_NOW, f"not possible while {state.value}: {event.value}", state=state.value
        )
    return after
