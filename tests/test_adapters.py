"""What is copied of an adapter, how long its files stay, and when the engine may be given it. No vLLM."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import AdapterLoaded, LoadAdapter, Sleep, SleepStateChanged
from refitd import adapters
from refitd.adapters import FILES, AdapterUses, copy_adapter
from tests.scripted_app import loaded_app

SOME_TURNS = 20


@pytest.fixture
def load_command(tmp_path: Path) -> LoadAdapter:
    """Of an adapter whose files nobody looks into."""
    source = tmp_path / "one"
    source.mkdir()
    for file in FILES:
        (source / file).write_text("{}")
    return LoadAdapter(name="one", path=str(source))


def test_an_adapter_is_used_for_as_long_as_any_request_holds_it() -> None:
    """Also by a request that fails; the base model is no adapter."""
    uses = AdapterUses()
    uses.begin(3)
    with uses.held(None), uses.held(3):
        with suppress(RuntimeError), uses.held(3):
            raise RuntimeError
        assert not uses.is_unused(3)
    assert uses.is_unused(3)


def test_a_request_that_comes_too_late_is_refused() -> None:
    """Its files are gone: the engine would die of looking for them."""
    uses = AdapterUses()
    uses.begin(3)
    uses.end(3)
    with pytest.raises(ProtocolError) as refused, uses.held(3):
        pass
    assert refused.value.code is ErrorCode.UNKNOWN_ADAPTER


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("replace", [fifo, device, directory, Path.unlink])
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_ordinary_file_is_not_copied(tmp_path: Path, replace: Callable[[Path], None], file: str) -> None:
    """A pipe would never come to its end, and a device would fill the disk: refused by name, and nothing stays."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in FILES:
        (source / name).write_text("{}")
    copy_adapter("one", source, target)
    assert sorted(path.name for path in target.iterdir()) == sorted(FILES)
    replace(source / file)
    with pytest.raises(ProtocolError, match=file) as refused:
        copy_adapter("one", source, tmp_path / "another")
    assert refused.value.code is ErrorCode.INVALID_ADAPTER
    assert not (tmp_path / "another").exists()


def test_an_engine_that_fell_asleep_meanwhile_is_given_no_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_command: LoadAdapter
) -> None:
    """Copying the files takes its time; the memory that the adapter would be written to is gone, and so is the copy."""
    copying, may_end = threading.Event(), threading.Event()

    def slowly(name: str, source: Path, target: Path) -> None:
        copying.set()
        assert may_end.wait(60)
        copy_adapter(name, source, target)

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch, lora={"enabled": True}) as scripted:
            session = scripted.session()
            loading = asyncio.create_task(scripted.ask(session, load_command, AdapterLoaded))
            await asyncio.to_thread(copying.wait, 60)
            try:
                await scripted.ask(session, Sleep(level=1), SleepStateChanged)
            finally:
                may_end.set()
            with pytest.raises(ProtocolError) as refused:
                await loading
            assert refused.value.code is ErrorCode.ASLEEP
            assert "refitd_load_adapter" not in scripted.llm.calls
            assert list((tmp_path / "adapters").iterdir()) == []

    monkeypatch.setattr(adapters, "copy_adapter", slowly)
    asyncio.run(run())


def test_the_engine_does_not_fall_asleep_in_the_middle_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_command: LoadAdapter
) -> None:
    """Sleep waits for it as for a request."""

    async def run() -> None:
        async with loaded_app(tmp_path, monkeypatch, lora={"enabled": True}) as scripted:
            session = scripted.session()
            held = scripted.llm.hold("refitd_load_adapter")
            loading = asyncio.create_task(scripted.ask(session, load_command, AdapterLoaded))
            await held.begun.wait()
            sleeping = asyncio.create_task(scripted.ask(session, Sleep(level=1), SleepStateChanged))
            for _ in range(SOME_TURNS):
                await asyncio.sleep(0)
            assert "sleep 1" not in scripted.llm.calls
            scripted.llm.release()
            await asyncio.gather(loading, sleeping)
            assert "sleep 1" in scripted.llm.calls

    asyncio.run(run())
