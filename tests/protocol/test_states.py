"""The state tables: every state can be reached and left, and a session can never write again once it is fenced."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.states import (
    ENGINE_TRANSITIONS,
    NEW_EPOCH,
    NOT_SERVABLE,
    SESSION_ENDS,
    SESSION_TRANSITIONS,
    SLEEP_TRANSITIONS,
    WRITER_TRANSITIONS,
    EngineEvent,
    EngineState,
    SessionEvent,
    SessionState,
    SleepEvent,
    SleepState,
    WriterEvent,
    WriterState,
    step,
)

TABLES: list[tuple[Any, type[StrEnum], type[StrEnum], StrEnum, set[StrEnum]]] = [
    (ENGINE_TRANSITIONS, EngineState, EngineEvent, EngineState.UNLOADED, {EngineState.DEAD}),
    (SESSION_TRANSITIONS, SessionState, SessionEvent, SessionState.ABSENT, set()),
    (WRITER_TRANSITIONS, WriterState, WriterEvent, WriterState.FREE, set()),
    (SLEEP_TRANSITIONS, SleepState, SleepEvent, SleepState.AWAKE, set()),
]
each_table = pytest.mark.parametrize(
    ("table", "states", "events", "first", "final"), TABLES, ids=["engine", "session", "writer", "sleep"]
)


def reachable(table: Mapping[Any, Any], first: Any) -> set[Any]:
    found = {first}
    while True:
        more = {after for (before, _), after in table.items() if before in found} - found
        if not more:
            return found
        found |= more


@each_table
def test_every_state_is_reachable(table: Any, states: Any, events: Any, first: Any, final: Any) -> None:
    assert reachable(table, first) == set(states)


@each_table
def test_only_final_states_are_dead_ends(table: Any, states: Any, events: Any, first: Any, final: Any) -> None:
    ends = {state for state in states if all(after is state for (before, _), after in table.items() if before is state)}
    assert ends == final


@each_table
def test_every_event_is_used(table: Any, states: Any, events: Any, first: Any, final: Any) -> None:
    assert {event for _, event in table} == set(events)


@each_table
def test_what_is_not_in_the_table_is_refused(table: Any, states: Any, events: Any, first: Any, final: Any) -> None:
    for state in states:
        for event in events:
            if (state, event) in table:
                assert step(table, state, event) is table[state, event]
            else:
                with pytest.raises(ProtocolError) as refusal:
                    step(table, state, event)
                assert refusal.value.code is ErrorCode.NOT_ALLOWED_NOW
                assert refusal.value.details["state"] == state.value


def test_engine_is_never_ready_straight_after_a_torn_refit() -> None:
    """From torn, only a whole set of weights leads back: a refit or a restore."""
    ways = {event for (state, event), after in ENGINE_TRANSITIONS.items() if state is EngineState.TORN and after}
    assert ways == {
        EngineEvent.REFIT_STARTED,
        EngineEvent.RESTORE_STARTED,
        EngineEvent.DRAIN_STARTED,
        EngineEvent.DIED,
    }


def test_every_state_that_serves_nothing_says_why() -> None:
    waiting = {EngineState.REFITTING, EngineState.RESTORING}
    assert set(EngineState) - set(NOT_SERVABLE) == {EngineState.READY, *waiting}


@given(st.lists(st.sampled_from(list(SessionEvent))))
def test_a_session_that_has_ended_never_comes_back(events: list[SessionEvent]) -> None:
    """Only a Hello opens one, and it is another; whatever comes in whatever order."""
    state, ended = SessionState.OPEN, False
    for event in events:
        after = SESSION_TRANSITIONS.get((state, event))
        if after is None:
            continue
        ended = ended or event in SESSION_ENDS
        state = after
        if event is SessionEvent.DAEMON_RESTARTED:
            return
        assert not (ended and state in (SessionState.OPEN, SessionState.DETACHED))


def test_requests_are_taken_only_while_the_session_lives() -> None:
    taking = {state for state, event in SESSION_TRANSITIONS if event is SessionEvent.REQUEST}
    assert taking == {SessionState.OPEN, SessionState.DETACHED}


def test_every_change_of_writer_begins_an_epoch() -> None:
    """So that no frame of an earlier writer can pass for one of the present."""
    for (before, event), after in WRITER_TRANSITIONS.items():
        same_writer = event is WriterEvent.ACQUIRED_AGAIN
        assert (event in NEW_EPOCH) == (after is WriterState.HELD and not same_writer), (before, event)
