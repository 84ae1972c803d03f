"""LoRA adapters by name: loaded from a directory, checked before any request can use them, replaced and let go.

The engine reads an adapter's files again whenever it needs them, and one that it cannot read would end it for all.
So each gets a copy of its own, which stays for as long as a request uses it.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from refit_protocol.errors import ErrorCode, ProtocolError
from refit_protocol.messages import AdapterLoaded, AdapterUnloaded, LoadAdapter, UnloadAdapter
from refit_protocol.states import EngineState
from refitd.checkpoints import readable_directory
from refitd.config import Config
from refitd.engine import Adapter, Engine, StartupError
from refitd.gate import Gate
from refitd.sessions import Answer, Call

FILES = ("adapter_config.json", "adapter_model.safetensors")
MAX_NAME = 200

log = structlog.get_logger()


class AdapterUses:
    """Which adapters' files are there, by number, and how many requests count on each."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def begin(self, number: int) -> None:
        self._counts[number] = 0

    def end(self, number: int) -> None:
        assert self.is_unused(number)
        del self._counts[number]

    def is_unused(self, number: int) -> bool:
        return self._counts[number] == 0

    @contextmanager
    def held(self, number: int | None) -> Iterator[None]:
        """For a whole request. Raises `unknown_adapter` where it comes too late; None is no adapter."""
        if number is None:
            yield
            return
        if number not in self._counts:
            raise ProtocolError(ErrorCode.UNKNOWN_ADAPTER, "the adapter was unloaded meanwhile")
        self._counts[number] += 1
        try:
            yield
        finally:
            self._counts[number] -= 1


class Adapters:
    """What `Generate.lora` may name. Belongs to the event loop's thread."""

    def __init__(self, config: Config, engine: Engine, gate: Gate) -> None:
        self._config = config
        self._engine = engine
        self._gate = gate
        self._copies = config.runtime_directory / "adapters"
        self._ids = itertools.count(1)
        self._order = asyncio.Lock()
        self._retired: list[Adapter] = []
        self.loaded: dict[str, Adapter] = {}
        self.uses = AdapterUses()
        self.on_change: Callable[[], None] = lambda: None

    async def load_configured(self) -> None:
        """Those of the configuration; raises `StartupError`."""
        shutil.rmtree(self._copies, ignore_errors=True)
        for name, directory in self._config.lora.adapters.items():
            try:
                await self._load(name, directory.expanduser().resolve())
            except ProtocolError as error:
                raise StartupError(f"lora.adapters: {error.message}") from error

    def close(self) -> None:
        """To be called when the engine has ended: nobody reads the copies any more."""
        shutil.rmtree(self._copies, ignore_errors=True)

    def find(self, name: str | None) -> Adapter | None:
        """None for the base model. Raises `unknown_adapter`, `unsupported`."""
        if name is None:
            return None
        self._require_enabled()
        adapter = self.loaded.get(name)
        if adapter is None:
            known = ", ".join(sorted(self.loaded)) or "none"
            raise ProtocolError(ErrorCode.UNKNOWN_ADAPTER, f"adapter {name!r} is not loaded; loaded are: {known}")
        return adapter

    async def load(self, call: Call) -> AsyncIterator[Answer]:
        """A name that is loaded already gets the new adapter; requests under way go on with the old one."""
        assert isinstance(call.body, LoadAdapter)
        self._require_enabled()
        await self._gate.admit()
        directory = readable_directory(call.body.path, self._config)
        await asyncio.shield(self._load(call.body.name, directory))
        yield Answer(AdapterLoaded(name=call.body.name))

    async def unload(self, call: Call) -> AsyncIterator[Answer]:
        """Requests under way go on with it."""
        assert isinstance(call.body, UnloadAdapter)
        adapter = self.find(call.body.name)
        assert adapter is not None
        await asyncio.shield(self._unload(adapter))
        yield Answer(AdapterUnloaded(name=adapter.name))

    async def _load(self, name: str, directory: Path) -> None:
        async with self._order:
            self._check_name(name)
            number = next(self._ids)
            adapter = Adapter(name, number, self._copies / str(number))
            await asyncio.to_thread(copy_adapter, name, directory, adapter.directory)
            try:
                await self._hand_over(adapter)
            except ProtocolError:
                shutil.rmtree(adapter.directory)
                raise
            self.uses.begin(number)
            self._retire(self.loaded.get(name))
            self.loaded[name] = adapter
            self.on_change()
            await self._clear_away()
        log.info("adapter loaded", name=name, directory=str(directory))

    async def _hand_over(self, adapter: Adapter) -> None:
        """Counts as a request: while files were copied the engine may have fallen asleep, and now it has to wait."""
        if self._gate.state is not EngineState.LOADING:
            await self._gate.admit()
        self._gate.enter()
        try:
            await self._engine.load_adapter(adapter)
        finally:
            self._gate.leave()

    async def _unload(self, adapter: Adapter) -> None:
        async with self._order:
            if self.loaded.get(adapter.name) is adapter:
                del self.loaded[adapter.name]
                self._retire(adapter)
                self.on_change()
            await self._clear_away()

    def _retire(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._retired.append(adapter)

    async def _clear_away(self) -> None:
        """What no request uses any more."""
        unused = [adapter for adapter in self._retired if self.uses.is_unused(adapter.id)]
        self._retired = [adapter for adapter in self._retired if adapter not in unused]
        for adapter in unused:
            self.uses.end(adapter.id)
            await self._engine.unload_adapter(adapter)
            shutil.rmtree(adapter.directory)

    def _require_enabled(self) -> None:
        if not self._config.lora.enabled:
            raise ProtocolError(ErrorCode.UNSUPPORTED, "this daemon serves no LoRA adapters: set lora.enabled = true")

    def _check_name(self, name: str) -> None:
        info = self._engine.info
        taken = () if info is None else (info.model.name, info.model.path)
        if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name in taken:
            raise _invalid(
                f"{name!r} cannot be the name of an adapter: 1 to {MAX_NAME} characters, not the model's own"
            )
        most = self._config.lora.max_adapters
        if name not in self.loaded and len(self.loaded) >= most:
            raise ProtocolError(ErrorCode.LIMIT_EXCEEDED, f"{most} adapters are loaded (lora.max_adapters)", limit=most)


def copy_adapter(name: str, source: Path, target: Path) -> None:
    """Raises `invalid_adapter` where a file cannot be copied; there is no target then."""
    target.mkdir(parents=True)
    try:
        for file in FILES:
            _copy_file(source / file, target / file)
    except OSError as error:
        shutil.rmtree(target)
        raise _invalid(f"adapter {name!r}: {error.filename}: {error.strerror}") from error


def _copy_file(source: Path, target: Path) -> None:
    """Of a pipe or a device there might be no end."""
    if not stat.S_ISREG(source.stat().st_mode):
        raise OSError(errno.EINVAL, "no ordinary file", str(source))
    shutil.copyfile(source, target)


def _invalid(message: str) -> ProtocolError:
    return ProtocolError(ErrorCode.INVALID_ADAPTER, message)
