"""Between the gate and the engine: a refit that begins there finds each request on one side or the other. No vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from refit_protocol.messages import Generate, Sampling
from refit_protocol.states import EngineEvent
from refitd.adapters import Adapters
from refitd.config import Config
from refitd.gate import Gate
from refitd.generation import Generation
from refitd.sessions import Answer, Call, Session, SessionState
from tests.server.small_daemon import ScriptedEngine

# More than any request needs from the gate to the engine.
SOME_TURNS = 10


class Serving:
    """A gate that has shut for a refit, and a generation that waits at it."""

    def __init__(self, directory: Path) -> None:
        config = Config(model="scripted", endpoint=f"ipc://{directory}/s")
        self.engine = ScriptedEngine()
        self.gate = Gate(config.refit.gate_wait_seconds, config.refit.max_waiting_requests)
        for event in (EngineEvent.LOAD_STARTED, EngineEvent.LOADED, EngineEvent.REFIT_STARTED):
            self.gate.step(event)
        adapters = Adapters(config, self.engine, self.gate)  # type: ignore[arg-type]
        self.generation = Generation(config, self.engine, self.gate, adapters)  # type: ignore[arg-type]
        self.session = Session("t", "t", 1, 9.0, b"", state=SessionState.OPEN)

    async def generate(self) -> list[Answer]:
        body = Generate(prompt_lengths=[1], sampling=Sampling(max_tokens=1), stream=False)
        call = Call(b"", 1, body, [np.array([5], np.int32).tobytes()], self.session)
        return [answer async for answer in self.generation.generate(call)]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("between", range(6))
def test_a_refit_that_follows_another_at_once_finds_no_request_in_between(tmp_path: Path, between: int) -> None:
    """However few turns the gate was open: what is not counted as running then waits, and is served afterwards."""

    async def run() -> None:
        serving = Serving(tmp_path)
        answers = asyncio.create_task(serving.generate())
        while serving.gate.waiting == 0:  # noqa: ASYNC110 - the gate tells nobody that somebody waits
            await asyncio.sleep(0)
        serving.gate.step(EngineEvent.REFIT_COMMITTED)
        await turns(between)
        serving.gate.step(EngineEvent.REFIT_STARTED)
        running = serving.gate.running
        await turns(SOME_TURNS)
        assert len(serving.engine.running) == running
        serving.gate.step(EngineEvent.REFIT_COMMITTED)
        while not serving.engine.running:  # noqa: ASYNC110 - the scripted engine has no event
            await asyncio.sleep(0)
        serving.engine.step()
        assert len(await answers) == 1

    asyncio.run(run())


def test_what_stands_by_gives_way_before_the_engine_hears_of_a_request(tmp_path: Path) -> None:
    """Though the gate is open: until then the trainer could have new weights copied under the request's steps."""

    async def run() -> None:
        serving = Serving(tmp_path)
        gate = serving.gate
        gate.step(EngineEvent.REFIT_COMMITTED)
        may_go = asyncio.Event()

        async def give_way() -> None:
            await may_go.wait()
            gate.give_way = None

        gate.give_way = give_way
        answers = asyncio.create_task(serving.generate())
        await turns(SOME_TURNS)
        assert (len(serving.engine.running), gate.running) == (0, 0)
        may_go.set()
        while not serving.engine.running:  # noqa: ASYNC110 - the scripted engine has no event
            await asyncio.sleep(0)
        serving.engine.step()
        assert len(await answers) == 1

    asyncio.run(run())
