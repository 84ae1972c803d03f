"""A load that fails after vLLM has started, in whatever comes then. No vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import LoadModel, ModelLoaded
from refit_trainer import AsyncDaemon, RefitdError
from refitd.app import ExitCode
from refitd.engine import EngineInfo, StartupError
from tests.scripted_app import ScriptedApp, build_app, worker_refusal


async def refuse(_info: EngineInfo) -> None:
    raise StartupError("lora.adapters: no such directory")


async def load(scripted: ScriptedApp) -> ProtocolError:
    with pytest.raises(ProtocolError) as failed:
        await scripted.ask(scripted.session(), LoadModel(), ModelLoaded)
    return failed.value


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("part", ["the weights are kept", "what the configuration names is loaded"])
def test_a_start_that_fails_late_ends_the_daemon_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, *, deferred: bool
) -> None:
    """With the exit code of a start that failed; who asked for the load is told why."""

    async def run() -> None:
        scripted = build_app(tmp_path, monkeypatch, defer_load=deferred, refit={"keep_last": "host"})
        scripted.app.lifecycle.on_loaded = []
        if part == "the weights are kept":
            scripted.llm.failures["refitd_keep_last"] = worker_refusal(ErrorCode.UNSUPPORTED)
        else:
            scripted.app.lifecycle.on_loaded = [refuse]
        ended = asyncio.create_task(scripted.app.run())
        if deferred:
            assert (await load(scripted)).code is ErrorCode.ENGINE_ERROR
        assert await ended is ExitCode.STARTUP

    asyncio.run(run())


def test_a_trainer_that_waits_is_told_why_the_load_failed(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon that knows the reason does not end before its sessions could ask for it."""

    async def run() -> None:
        waited_for = asyncio.Event()

        async def refuse_later(info: EngineInfo) -> None:
            await waited_for.wait()
            await refuse(info)

        scripted = build_app(short_directory, monkeypatch)
        scripted.app.lifecycle.on_loaded = [refuse_later]
        ended = asyncio.create_task(scripted.app.run())
        daemon = await AsyncDaemon.connect(f"ipc://{short_directory}/s")
        waiting = asyncio.create_task(daemon.wait_until_ready())
        waited_for.set()
        with pytest.raises(RefitdError, match=r"no such directory; the daemon ends") as failed:
            await waiting
        assert failed.value.code is ErrorCode.ENGINE_ERROR
        assert await ended is ExitCode.STARTUP
        await daemon.close()

    asyncio.run(run())


def test_a_bug_in_a_deferred_load_ends_the_daemon_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not stay `loading` for ever."""

    async def fail(_info: EngineInfo) -> None:
        raise RuntimeError("a bug")

    async def run() -> None:
        scripted = build_app(tmp_path, monkeypatch, defer_load=True)
        scripted.app.lifecycle.on_loaded = [fail]
        ended = asyncio.create_task(scripted.app.run())
        with pytest.raises(RuntimeError, match="a bug"):
            await scripted.ask(scripted.session(), LoadModel(), ModelLoaded)
        with pytest.raises(RuntimeError, match="a bug"):
            await ended

    asyncio.run(run())
