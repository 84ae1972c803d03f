"""What is copied of an adapter, and how long its files stay."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.adapters import FILES, AdapterUses, copy_adapter


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
