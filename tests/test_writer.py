"""How the writer's role passes on while letting go takes its time. No vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from refit_protocol.messages import ReleaseWriter, WriterReleased
from tests.scripted_app import loaded_app


def test_letting_go_is_done_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the request is cancelled in the middle: the role is free, and nothing is open."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            session, epoch = await scripted.writer()
            for _ in range(2):
                await scripted.open(session, epoch)
            closing = scripted.llm.hold("refitd_close_source")
            releasing = asyncio.create_task(scripted.ask(session, ReleaseWriter(), WriterReleased))
            await closing.begun.wait()
            releasing.cancel()
            await asyncio.wait({releasing})
            scripted.llm.release()
            await scripted.app.refit.settle()
            assert scripted.app.refit.sources == 0
            assert scripted.app.refit.writer.session is None

    asyncio.run(run())
