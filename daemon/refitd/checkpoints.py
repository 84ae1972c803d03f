"""Which directories clients may have read, and whether a checkpoint lies there: before the engine is asked."""

from __future__ import annotations

from pathlib import Path

from refit_protocol.endpoint import socket_path
from refit_protocol.errors import ErrorCode, ProtocolError
from refitd.config import Config
from refitd.model_files import model_problem


def checkpoint_directory(path: str | None, config: Config) -> Path:
    """The model's own, or the one named. Raises `invalid_checkpoint` where it may not or cannot be loaded."""
    if path is None and not _own(config).is_dir():
        raise _invalid(f"the model was loaded by its name {config.model}: name the directory of a checkpoint")
    directory = readable_directory(str(_own(config).absolute()) if path is None else path, config)
    try:
        problem = model_problem(directory)
    except OSError as error:
        raise _invalid(f"{directory} cannot be read: {error.strerror}") from error
    if problem:
        raise _invalid(problem)
    return directory


def readable_directory(path: str, config: Config) -> Path:
    """Resolved, with symbolic links followed. Raises `invalid_checkpoint` for what clients may not have read."""
    if not Path(path).is_absolute():
        raise _invalid(f"{path!r} is not absolute: the daemon's working directory is not yours")
    try:
        directory = Path(path).resolve()
        allowed = _is_allowed(directory, _own(config).resolve(), config)
    except (OSError, ValueError) as error:
        raise _invalid(f"{path!r} cannot be read: {error}") from error
    if not allowed:
        raise _invalid(f"{directory} is not below any of refit.checkpoint_roots")
    return directory


def _own(config: Config) -> Path:
    return Path(config.model).expanduser()


def _is_allowed(directory: Path, own: Path, config: Config) -> bool:
    roots = config.refit.checkpoint_roots
    local = socket_path(config.endpoint) is not None
    if directory == own or (roots is None and local):
        return True
    return any(directory.is_relative_to(root.resolve()) for root in roots or ())


def _invalid(message: str) -> ProtocolError:
    return ProtocolError(ErrorCode.INVALID_CHECKPOINT, message)
