"""The command line: arguments in, exit codes out. Heavy imports wait until the arguments are known to be good."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

from refitd import parent_death

parent_death.install_from_environment()

try:
    import typer
except ImportError:
    sys.exit("refitd: the service is not installed: pip install 'refitd[cpu]' (or [cuda12], [cuda13])")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
EndpointOption = Annotated[str | None, typer.Option(help="ipc:// path to listen on or connect to.")]


@app.callback()
def refitd() -> None:
    """A daemon that owns a vLLM engine: trainers push weights into it and get tokens streamed back."""


@app.command()
def serve(
    model: Annotated[str | None, typer.Option(help="Model directory.")] = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting as section.key=value (TOML value); repeatable.")
    ] = None,
) -> None:
    """Starts the engine and serves until SIGTERM."""
    from refitd.app import ExitCode
    from refitd.app import serve as serve_app
    from refitd.config import ConfigError, load_config

    try:
        loaded = load_config(_flags(model, endpoint, settings or []), config)
        _check_model(loaded.model)
    except ConfigError as error:
        _fail(str(error), ExitCode.CONFIGURATION)
    sys.exit(serve_app(loaded, os.environ))


def _flags(model: str | None, endpoint: str | None, settings: list[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for setting in settings:
        _set(flags, setting)
    if model is not None:
        flags["model"] = model
    if endpoint is not None:
        flags["endpoint"] = endpoint
    return flags


def _set(flags: dict[str, Any], setting: str) -> None:
    """`refit.policy=keep` or `refit.policy="keep"`: a word that is no TOML value is a string."""
    import tomllib

    from refitd.config import ConfigError

    name, equals, value = setting.partition("=")
    if not equals:
        raise ConfigError(f"--set {setting!r}: write section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *sections, key = name.strip().split(".")
    for section in sections:
        flags = flags.setdefault(section, {})
    flags[key] = parsed


def _check_model(model: str) -> None:
    """A path that is wrong must not cost a model load to find out."""
    from refitd.config import ConfigError

    path = Path(model)
    looks_like_path = path.is_absolute() or model.startswith(("./", "../", "~"))
    if looks_like_path and not path.expanduser().is_dir():
        raise ConfigError(f"model directory {model} does not exist")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"model directory {model} has no config.json: is it the right one?")


def _fail(message: str, code: int) -> None:
    print(f"refitd: {message}", file=sys.stderr)  # noqa: T201 - the one line an operator sees
    sys.exit(code)


def main() -> None:
    """The console script."""
    app()
