"""Which directory a reload may read."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.checkpoints import checkpoint_directory
from refitd.config import Config


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "own")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "others" / "one")


def checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return directory


def config(model: str | Path, *, over_tcp: bool = False, roots: list[Path] | None = None) -> Config:
    endpoint = "tcp://127.0.0.1:1" if over_tcp else "ipc:///tmp/x"
    server = {"curve_secret_key": "k", "curve_clients": "c"}
    return Config(model=str(model), endpoint=endpoint, server=server, refit={"checkpoint_roots": roots})


def refusal(path: str | None, settings: Config) -> str:
    with pytest.raises(ProtocolError) as refused:
        checkpoint_directory(path, settings)
    assert refused.value.code is ErrorCode.INVALID_CHECKPOINT
    return refused.value.message


def test_without_a_path_it_is_the_models_own(own: Path) -> None:
    """A model that was loaded by its name has none."""
    assert checkpoint_directory(None, config(own, over_tcp=True, roots=[])) == own
    assert "name the directory" in refusal(None, config("org/model"))


def test_local_clients_may_name_any_directory_and_those_over_tcp_none(own: Path, other: Path) -> None:
    """Unless roots say otherwise."""
    assert checkpoint_directory(str(other), config(own)) == other
    assert "checkpoint_roots" in refusal(str(other), config(own, over_tcp=True))
    assert checkpoint_directory(str(own), config(own, over_tcp=True)) == own


def test_roots_hold_for_everybody_and_cannot_be_left_by_links(own: Path, other: Path, tmp_path: Path) -> None:
    """Neither by dots nor by a symbolic link inside a root."""
    root = other.parent
    for over_tcp in (False, True):
        settings = config(own, over_tcp=over_tcp, roots=[root])
        assert checkpoint_directory(str(other), settings) == other
        outside = checkpoint(tmp_path / f"outside-{over_tcp}")
        (root / f"link-{over_tcp}").symlink_to(outside)
        for path in (outside, root / f"link-{over_tcp}", root / ".." / outside.name):
            assert "checkpoint_roots" in refusal(str(path), settings)


@pytest.mark.parametrize("path", ["others/one", "", "\0", "/nowhere"])
def test_a_path_that_leads_nowhere_is_refused(own: Path, path: str) -> None:
    """Relative, empty, impossible, missing."""
    refusal(path, config(own))


def test_what_model_loading_would_miss_is_missed_here_too(own: Path) -> None:
    """A directory without weights, for one."""
    (own / "model.safetensors").unlink()
    assert "no weights" in refusal(None, config(own))
