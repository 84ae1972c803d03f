"""Which checkpoint a reload may read: looked at before the engine is asked for anything."""

from __future__ import annotations

from pathlib import Path

from refit_protocol.endpoint import socket_path
from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.config import Config
from refitd.model_files import model_problem


def checkpoint_directory(path: str | None, config: Config) -> Path:
    """Resolved, with symbolic links followed. Raises `invalid_checkpoint` where it may not or cannot be read."""
    own = Path(config.model).expanduser()
    if path is None and not own.is_dir():
        raise _invalid(f"the model was loaded by its name {config.model}: name the directory of a checkpoint")
    named = own if path is None else Path(path)
    if path is not None and not named.is_absolute():
        raise _invalid(f"{path} is not absolute: the daemon's working directory is not yours")
    try:
        directory = named.resolve()
        if not _is_allowed(directory, own.resolve(), config):
            raise _invalid(f"{directory} is not below any of refit.checkpoint_roots")
        problem = model_problem(directory)
    except (OSError, ValueError) as error:
        raise _invalid(f"{named} cannot be read: {error}") from error
    if problem:
        raise _invalid(problem)
    return directory


def _is_allowed(directory: Path, own: Path, config: Config) -> bool:
    roots = config.refit.checkpoint_roots
    local = socket_path(config.endpoint) is not None
    if directory == own or (roots is None and local):
        return True
    return any(directory.is_relative_to(root.resolve()) for root in roots or ())


def _invalid(message: str) -> ProtocolError:
    return ProtocolError(ErrorCode.INVALID_CHECKPOINT, message)
