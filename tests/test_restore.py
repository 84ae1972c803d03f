"""Putting back kept weights: served only if they are what was committed. The workers are an object that answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from refit_protocol.digest import combine_parts
from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.states import EngineEvent, EngineState
from refitd.commit import Commit
from refitd.config import Config, RefitConfig
from refitd.gate import Gate
from refitd.open_refit import OpenRefit
from refitd.refit import Refit
from refitd.sessions import Session
from refitd.source import Source

TORN = (EngineEvent.LOAD_STARTED, EngineEvent.LOADED, EngineEvent.REFIT_STARTED, EngineEvent.REFIT_TORN)


@dataclass
class Workers:
    """One worker whose weights have this digest."""

    digest: str
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    is_still: bool = True

    async def call_workers(self, *call: Any, **_: Any) -> list[dict[str, Any]]:
        self.asked.append(call)
        parts = {"layer": self.digest}
        return [{"digest": combine_parts([parts]), "digest_parts": parts, "wrote": True}]

    async def clean_cache(self, _timeout_seconds: float) -> None:
        """Nothing is in it."""


def torn(workers: Workers) -> tuple[Commit, Gate]:
    """After a refit that failed; the weights from before it were kept."""
    gate = Gate(5.0, 8)
    commit = Commit(RefitConfig(keep_last="host"), workers, gate)  # type: ignore[arg-type]
    asyncio.run(commit.begin_service())
    for event in TORN:
        gate.step(event)
    return commit, gate


def test_weights_that_are_what_was_kept_are_served() -> None:
    workers = Workers("00000000000000aa")
    commit, gate = torn(workers)
    digest = commit.digest
    asyncio.run(commit.restore())
    assert workers.asked[-1] == ("refitd_restore", "sampled")
    assert (gate.state, commit.digest) == (EngineState.READY, digest)


def test_weights_that_are_not_what_was_kept_stay_torn() -> None:
    """Whatever changed them, on the way or in memory: a full refit mends it."""
    workers = Workers("00000000000000aa")
    commit, gate = torn(workers)
    workers.digest = "00000000000000bb"
    with pytest.raises(ProtocolError) as failed:
        asyncio.run(commit.restore())
    assert failed.value.code is ErrorCode.ATTEST_FAILED
    assert gate.state is EngineState.TORN


def test_broadcasts_are_ended_before_anything_is_put_back() -> None:
    """They may be arriving in the very weights; the gate opens last."""

    async def run() -> list[str]:
        gate, config = Gate(5.0, 8), Config(model="m", refit={"keep_last": "host"})
        commit = Commit(config.refit, workers, gate)  # type: ignore[arg-type]
        refits = Refit(config, workers, gate, commit, 1)  # type: ignore[arg-type]
        await commit.begin_service()
        for event in (EngineEvent.LOAD_STARTED, EngineEvent.LOADED):
            gate.step(event)
        session = Session("token", "client", None, 60.0, b"")
        source = refits._sources._sources[1] = Source(1, session, "collective", ())
        ticket = commit.ticket(
            version=None, policy="keep", attest="sampled", check_finite=False, deadline_seconds=60.0, partial=False
        )
        refit = OpenRefit(1, session, source, {}, ticket, reception="under way")
        await refits._window.enter(refit)
        workers.asked.clear()
        await refits._window.abort(refit, "the test says so")
        assert gate.state is EngineState.READY
        return [method for method, *_ in workers.asked]

    workers = Workers("00000000000000aa")
    assert asyncio.run(run()) == ["refitd_abort", "refitd_close_source", "refitd_restore"]
