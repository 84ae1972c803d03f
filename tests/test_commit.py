"""The window of a refit: what a failure in it says about the weights. No vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import CommitRefit, RefitCommitted
from refit_protocol.states import EngineState
from tests.scripted_app import loaded_app, worker_refusal


def test_a_cache_that_cannot_be_cleaned_refuses_the_refit_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else new weights would be served under the old version and digest, as nothing says that anything was written."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch) as scripted:
            session, epoch = await scripted.writer()
            source = await scripted.open(session, epoch)
            scripted.llm.nan_seen = True
            scripted.llm.failures["refitd_clean_cache"] = worker_refusal(ErrorCode.INTERNAL)
            with pytest.raises(ProtocolError) as refused:
                await scripted.ask(session, CommitRefit(epoch=epoch, source=source), RefitCommitted)
            assert refused.value.code is ErrorCode.INTERNAL
            assert "refitd_commit" not in scripted.llm.calls
            assert (scripted.app.gate.state, scripted.app.gate.version) == (EngineState.READY, 0)
            del scripted.llm.failures["refitd_clean_cache"]
            await scripted.ask(session, CommitRefit(epoch=epoch, source=source), RefitCommitted)
            assert not scripted.llm.nan_seen
            assert scripted.llm.calls.index("refitd_clean_cache") < scripted.llm.calls.index("refitd_commit")

    asyncio.run(run())
