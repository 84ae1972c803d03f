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
    RESTORING = "restoring"
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
    RESTORE_STARTED = "restore of the last committed weights started"
    RESTORED = "last committed weights restored"
    RESTORE_FAILED = "restore failed"
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
    (_S.ASLEEP, _E.REFIT_STARTED): _S.REFITTING,
    (_S.REFITTING, _E.REFIT_COMMITTED): _S.READY,
    (_S.REFITTING, _E.REFIT_REFUSED): _S.READY,
    (_S.REFITTING, _E.REFIT_TORN): _S.TORN,
    (_S.REFITTING, _E.RESTORE_STARTED): _S.RESTORING,
    (_S.TORN, _E.RESTORE_STARTED): _S.RESTORING,
    (_S.RESTORING, _E.RESTORED): _S.READY,
    (_S.RESTORING, _E.RESTORE_FAILED): _S.TORN,
    (_S.READY, _E.FELL_ASLEEP): _S.ASLEEP,
    (_S.ASLEEP, _E.WOKE): _S.READY,
    (_S.UNLOADED, _E.DRAIN_STARTED): _S.DRAINING,
    (_S.LOADING, _E.DRAIN_STARTED): _S.DRAINING,
    (_S.READY, _E.DRAIN_STARTED): _S.DRAINING,
    (_S.TORN, _E.DRAIN_STARTED): _S.DRAINING,
    (_S.ASLEEP, _E.DRAIN_STARTED): _S.DRAINING,
    **{(state, _E.DIED): _S.DEAD for state in EngineState},
}

# Why a request that needs a servable engine is refused, by state; in `ready` it is not, in `refitting` and `restoring`
# it waits.
NOT_SERVABLE: dict[EngineState, tuple[ErrorCode, str]] = {
    _S.UNLOADED: (ErrorCode.LOADING, "the model is not loaded yet: have it loaded (LoadModel, load_model())"),
    _S.LOADING: (ErrorCode.LOADING, "the model is still loading: wait until it serves (Status, wait_until_ready())"),
    _S.TORN: (
        ErrorCode.TORN,
        "a refit failed half-way: commit a full refit, or restore the last (RestoreWeights, restore())",
    ),
    _S.ASLEEP: (ErrorCode.ASLEEP, "the engine is asleep: wake it first (WakeUp, wake_up())"),
    _S.DRAINING: (ErrorCode.DRAINING, "the daemon is shutting down: connect to another, or wait for its restart"),
    _S.DEAD: (ErrorCode.ENGINE_DEAD, "the engine has died: the daemon exits so that its supervisor restarts it"),
}


class SleepState(StrEnum):
    """What of the engine sleeps. `empty`: level 2 dropped the weights, and they lie there unwritten since."""

    AWAKE = "awake"
    LEVEL_1 = "asleep at level 1"
    LEVEL_1_WEIGHTS_AWAKE = "level 1, weights awake"
    LEVEL_1_KV_CACHE_AWAKE = "level 1, KV cache awake"
    LEVEL_2 = "asleep at level 2"
    LEVEL_2_WEIGHTS_EMPTY = "level 2, weights awake but empty"
    LEVEL_2_KV_CACHE_AWAKE = "level 2, KV cache awake"
    EMPTY = "awake, but the weights are empty"


class SleepEvent(StrEnum):
    SLEEP_1 = "sleep at level 1"
    SLEEP_2 = "sleep at level 2"
    SLEEP_GIVEN_UP = "sleep given up before the engine was asked"
    WAKE_ALL = "wake up"
    WAKE_WEIGHTS = "wake the weights"
    WAKE_KV_CACHE = "wake the KV cache"
    FULL_REFIT = "full refit"
    PARTIAL_REFIT = "partial refit"


_P, _V = SleepState, SleepEvent
SLEEP_TRANSITIONS: dict[tuple[SleepState, SleepEvent], SleepState] = {
    (_P.AWAKE, _V.SLEEP_1): _P.LEVEL_1,
    (_P.AWAKE, _V.SLEEP_2): _P.LEVEL_2,
    (_P.AWAKE, _V.WAKE_ALL): _P.AWAKE,
    (_P.AWAKE, _V.WAKE_WEIGHTS): _P.AWAKE,
    (_P.AWAKE, _V.WAKE_KV_CACHE): _P.AWAKE,
    (_P.AWAKE, _V.FULL_REFIT): _P.AWAKE,
    (_P.AWAKE, _V.PARTIAL_REFIT): _P.AWAKE,
    (_P.LEVEL_1, _V.SLEEP_1): _P.LEVEL_1,
    (_P.LEVEL_1, _V.SLEEP_GIVEN_UP): _P.AWAKE,
    (_P.LEVEL_1, _V.WAKE_ALL): _P.AWAKE,
    (_P.LEVEL_1, _V.WAKE_WEIGHTS): _P.LEVEL_1_WEIGHTS_AWAKE,
    (_P.LEVEL_1, _V.WAKE_KV_CACHE): _P.LEVEL_1_KV_CACHE_AWAKE,
    (_P.LEVEL_1_WEIGHTS_AWAKE, _V.WAKE_ALL): _P.AWAKE,
    (_P.LEVEL_1_WEIGHTS_AWAKE, _V.WAKE_WEIGHTS): _P.LEVEL_1_WEIGHTS_AWAKE,
    (_P.LEVEL_1_WEIGHTS_AWAKE, _V.WAKE_KV_CACHE): _P.AWAKE,
    (_P.LEVEL_1_WEIGHTS_AWAKE, _V.FULL_REFIT): _P.LEVEL_1_WEIGHTS_AWAKE,
    (_P.LEVEL_1_WEIGHTS_AWAKE, _V.PARTIAL_REFIT): _P.LEVEL_1_WEIGHTS_AWAKE,
    (_P.LEVEL_1_KV_CACHE_AWAKE, _V.WAKE_ALL): _P.AWAKE,
    (_P.LEVEL_1_KV_CACHE_AWAKE, _V.WAKE_WEIGHTS): _P.AWAKE,
    (_P.LEVEL_1_KV_CACHE_AWAKE, _V.WAKE_KV_CACHE): _P.LEVEL_1_KV_CACHE_AWAKE,
    (_P.LEVEL_2, _V.SLEEP_2): _P.LEVEL_2,
    (_P.LEVEL_2, _V.SLEEP_GIVEN_UP): _P.AWAKE,
    (_P.LEVEL_2, _V.WAKE_ALL): _P.EMPTY,
    (_P.LEVEL_2, _V.WAKE_WEIGHTS): _P.LEVEL_2_WEIGHTS_EMPTY,
    (_P.LEVEL_2, _V.WAKE_KV_CACHE): _P.LEVEL_2_KV_CACHE_AWAKE,
    (_P.LEVEL_2_WEIGHTS_EMPTY, _V.WAKE_ALL): _P.EMPTY,
    (_P.LEVEL_2_WEIGHTS_EMPTY, _V.WAKE_WEIGHTS): _P.LEVEL_2_WEIGHTS_EMPTY,
    (_P.LEVEL_2_WEIGHTS_EMPTY, _V.WAKE_KV_CACHE): _P.EMPTY,
    (_P.LEVEL_2_WEIGHTS_EMPTY, _V.FULL_REFIT): _P.LEVEL_1_WEIGHTS_AWAKE,
    (_P.LEVEL_2_KV_CACHE_AWAKE, _V.WAKE_ALL): _P.EMPTY,
    (_P.LEVEL_2_KV_CACHE_AWAKE, _V.WAKE_WEIGHTS): _P.EMPTY,
    (_P.LEVEL_2_KV_CACHE_AWAKE, _V.WAKE_KV_CACHE): _P.LEVEL_2_KV_CACHE_AWAKE,
    (_P.EMPTY, _V.WAKE_ALL): _P.EMPTY,
    (_P.EMPTY, _V.WAKE_WEIGHTS): _P.EMPTY,
    (_P.EMPTY, _V.WAKE_KV_CACHE): _P.EMPTY,
    (_P.EMPTY, _V.FULL_REFIT): _P.AWAKE,
}

# What sleeps in each state, as `Status` and `SleepStateChanged` say it: (level, asleep tags).
ASLEEP: dict[SleepState, tuple[int, tuple[str, ...]]] = {
    _P.AWAKE: (0, ()),
    _P.LEVEL_1: (1, ("weights", "kv_cache")),
    _P.LEVEL_1_WEIGHTS_AWAKE: (1, ("kv_cache",)),
    _P.LEVEL_1_KV_CACHE_AWAKE: (1, ("weights",)),
    _P.LEVEL_2: (2, ("weights", "kv_cache")),
    _P.LEVEL_2_WEIGHTS_EMPTY: (2, ("kv_cache",)),
    _P.LEVEL_2_KV_CACHE_AWAKE: (2, ("weights",)),
    _P.EMPTY: (2, ()),
}


class SessionState(StrEnum):
    """`detached`: the session lives, but its connection is lost; streams wait, what was answered may be lost."""

    ABSENT = "absent"
    OPEN = "open"
    DETACHED = "detached"
    CLOSING = "closing"
    CLOSED = "closed"


class SessionEvent(StrEnum):
    HELLO = "hello"
    REQUEST = "request, the lease is renewed"
    RESUMED = "hello that names the session"
    RETURNED = "request from its own lost connection"
    CONNECTION_LOST = "connection lost"
    IDENTITY_TAKEN = "hello of another session from the same identity"
    GOODBYE = "goodbye"
    LEASE_ENDED = "lease ended"
    PROCESS_ENDED = "its process ended"
    UNREAD = "it does not read its replies"
    DAEMON_STOPPED = "the daemon stops"
    RELEASED = "all it held is released"
    DAEMON_RESTARTED = "another daemon answers"


_L, _O = SessionState, SessionEvent
SESSION_ENDS = (_O.GOODBYE, _O.LEASE_ENDED, _O.PROCESS_ENDED, _O.UNREAD, _O.DAEMON_STOPPED)
SESSION_TRANSITIONS: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (_L.ABSENT, _O.HELLO): _L.OPEN,
    (_L.OPEN, _O.REQUEST): _L.OPEN,
    (_L.OPEN, _O.RESUMED): _L.OPEN,
    (_L.OPEN, _O.CONNECTION_LOST): _L.DETACHED,
    (_L.OPEN, _O.IDENTITY_TAKEN): _L.DETACHED,
    (_L.DETACHED, _O.REQUEST): _L.DETACHED,
    (_L.DETACHED, _O.RESUMED): _L.OPEN,
    (_L.DETACHED, _O.RETURNED): _L.OPEN,
    (_L.DETACHED, _O.CONNECTION_LOST): _L.DETACHED,
    **{(state, end): _L.CLOSING for state in (_L.OPEN, _L.DETACHED) for end in SESSION_ENDS},
    (_L.CLOSING, _O.RELEASED): _L.CLOSED,
    **{(state, _O.DAEMON_RESTARTED): _L.ABSENT for state in SessionState},
}


class WriterState(StrEnum):
    """Of the one role that may write weights; every frame of a writer names the epoch it was given."""

    FREE = "free"
    HELD = "held"


class WriterEvent(StrEnum):
    ACQUIRED = "acquired"
    ACQUIRED_AGAIN = "acquired by its holder"
    TAKEN_OVER = "taken over by another session"
    RELEASED = "released, or its session closed"


_W, _A = WriterState, WriterEvent
WRITER_TRANSITIONS: dict[tuple[WriterState, WriterEvent], WriterState] = {
    (_W.FREE, _A.ACQUIRED): _W.HELD,
    (_W.HELD, _A.ACQUIRED_AGAIN): _W.HELD,
    (_W.HELD, _A.TAKEN_OVER): _W.HELD,
    (_W.HELD, _A.RELEASED): _W.FREE,
}
# After these, frames of the epoch before are stale.
NEW_EPOCH = frozenset({_A.ACQUIRED, _A.TAKEN_OVER})


class GroupState(StrEnum):
    """Of the ranks of one trainer that lend their memory as one source. `dissolved`: whoever comes is refused."""

    GATHERING = "gathering"
    OPENING = "opening"
    OPEN = "open"
    ANNOUNCING = "announcing"
    COMMITTING = "committing"
    DISSOLVED = "dissolved"


class GroupEvent(StrEnum):
    RANK_JOINED = "rank joined"
    ALL_JOINED = "all ranks joined"
    MAPPED = "workers mapped all memory"
    RANK_ANNOUNCED = "rank announced a commit"
    ALL_ANNOUNCED = "all ranks announced it"
    COMMIT_ENDED = "commit ended, either way"
    NOT_AGREED = "ranks differ, or one is late with its commit"
    DISSOLVED = "a rank left, was late or wrong, or the writer changed"


_G, _J = GroupState, GroupEvent
GROUP_TRANSITIONS: dict[tuple[GroupState, GroupEvent], GroupState] = {
    (_G.GATHERING, _J.RANK_JOINED): _G.GATHERING,
    (_G.GATHERING, _J.ALL_JOINED): _G.OPENING,
    (_G.OPENING, _J.MAPPED): _G.OPEN,
    (_G.OPEN, _J.RANK_ANNOUNCED): _G.ANNOUNCING,
    (_G.ANNOUNCING, _J.RANK_ANNOUNCED): _G.ANNOUNCING,
    (_G.ANNOUNCING, _J.ALL_ANNOUNCED): _G.COMMITTING,
    (_G.ANNOUNCING, _J.NOT_AGREED): _G.OPEN,
    (_G.COMMITTING, _J.COMMIT_ENDED): _G.OPEN,
    **{(state, _J.DISSOLVED): _G.DISSOLVED for state in GroupState},
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
