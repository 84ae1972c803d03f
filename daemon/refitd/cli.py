"""The command line: arguments in, exit codes out. Heavy imports wait until the arguments are known to be good."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from refit_protocol.endpoint import default_directory, default_endpoint
from refit_protocol.messages import Status
from refit_protocol.states import EngineState
from refitd import parent_death

parent_death.install_from_environment()

try:
    import typer
except ImportError:
    sys.exit(
        "refitd: the command needs two small packages: pip install 'refitd[tools]'; "
        "the service: pip install 'refitd[cpu]' (or [cuda12], [cuda13])"
    )

if TYPE_CHECKING:
    from refit_trainer import CurveKeys, Daemon
    from refitd.config import Config
    from refitd.doctor import Subject

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
EndpointOption = Annotated[str | None, typer.Option(help="ipc:// path or tcp:// address to listen on or connect to.")]
KeysOption = Annotated[
    Path | None, typer.Option("--keys", help="For tcp://: this client's NAME.key_secret, made by refitd keygen.")
]
ServerKeyOption = Annotated[
    str | None, typer.Option("--server-key", help="For tcp://: the daemon's public key, or the file that holds it.")
]
# What the extra `service` installs; `doctor`, `keygen`, `status` and `top` do without.
SERVICE_MODULES = frozenset({"prometheus_client", "psutil", "pydantic", "pydantic_settings", "structlog", "uvicorn"})
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


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
    replace: Annotated[bool, typer.Option("--replace", help="End an engine that an earlier run left behind.")] = False,
) -> None:
    """Starts the engine and serves until SIGTERM."""
    from refitd.app import ExitCode
    from refitd.app import serve as serve_app
    from refitd.config import ConfigError, load_config

    def load() -> Config:
        return load_config(_flags(model, endpoint, settings or []), config)

    try:
        loaded = load()
        _check_loadable(loaded)
    except ConfigError as error:
        _fail(str(error), ExitCode.CONFIGURATION)
    code = serve_app(loaded, os.environ, load, replace=replace)
    sys.stdout.flush()
    sys.stderr.flush()
    # All is stopped and released; taking torch and vLLM down module by module would only cost seconds.
    os._exit(code)


@app.command()
def status(
    endpoint: EndpointOption = None,
    keys: KeysOption = None,
    server_key: ServerKeyOption = None,
    json: JsonOption = False,
    ready: Annotated[bool, typer.Option("--ready", help="Exit with 0 only if the engine serves, else with 1.")] = False,
) -> None:
    """Says once what the daemon is doing."""
    from rich.console import Console

    from refitd.top import status_json, status_view

    seen = _ask_status(_reach(endpoint, keys, server_key))
    console = Console()
    if json:
        console.print_json(status_json(seen))
    else:
        console.print(status_view(seen))
    if ready and seen.state is not EngineState.READY:
        sys.exit(1)


@app.command()
def reload(
    path: Annotated[Path | None, typer.Argument(help="Directory of a checkpoint; without it, the model's own.")] = None,
    endpoint: EndpointOption = None,
    keys: KeysOption = None,
    server_key: ServerKeyOption = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="Of the weights; without it, the served one plus one.")
    ] = None,
    takeover: Annotated[bool, typer.Option("--takeover", help="Take the writer's role from a trainer.")] = False,
) -> None:
    """Makes the running engine serve a checkpoint's weights."""
    from refit_trainer import RefitdError

    reach = _reach(endpoint, keys, server_key)
    try:
        with reach.connect("refitd reload") as daemon:
            daemon.acquire_writer(takeover=takeover)
            report = daemon.reload(None if path is None else path.absolute(), version=version)
    except RefitdError as error:
        _fail(str(error), 1)
    typer.echo(f"version {report.version} is served, digest {report.digest}, {report.milliseconds.total:.0f} ms")


@app.command()
def top(
    endpoint: EndpointOption = None,
    keys: KeysOption = None,
    server_key: ServerKeyOption = None,
    interval_seconds: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Shows the daemon live, until Ctrl-C; waits for one that is not there."""
    import time

    from rich.live import Live

    from refitd.top import History, Moment, followed_by, top_view

    reach = _reach(endpoint, keys, server_key)
    history = History()
    with Live(screen=True, auto_refresh=False) as live:
        try:
            while True:
                seen = _status_or_none(reach, "refitd top")
                if seen is not None:
                    history = followed_by(history, Moment(time.monotonic(), seen, seen.generated_tokens))
                live.update(top_view(history if seen is not None else History(), reach.endpoint), refresh=True)
                time.sleep(interval_seconds)
        except KeyboardInterrupt:
            return


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Model directory to check too.")] = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = None,
    keys: KeysOption = None,
    server_key: ServerKeyOption = None,
    json: JsonOption = False,
) -> None:
    """Checks what a daemon and its trainers need; exits with 1 if anything fails."""
    from rich.console import Console

    from refitd.doctor import examine
    from refitd.doctor.finding import any_failed
    from refitd.doctor.report import as_json, as_table

    if model is None and config is None:
        subject = _found(_reach(endpoint, keys, server_key))
    else:
        subject = _configured(_flags(model, endpoint, []), config, keys, server_key)
    findings = list(examine(subject))
    console = Console()
    if json:
        console.print_json(as_json(findings))
    else:
        console.print(as_table(findings))
    sys.exit(1 if any_failed(findings) else 0)


@app.command("install-service", context_settings={"ignore_unknown_options": True, "help_option_names": []})
def install_service(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Puts the daemon under systemd, for a machine or for a login; --help has the options."""
    script = Path(__file__).with_name("systemd") / "install-service"
    command = Path(sys.executable).with_name("refitd")
    own = ["--refitd", str(command)] if command.exists() else []
    os.execvp("bash", ["bash", str(script), *own, *(arguments or [])])


@app.command()
def keygen(
    directory: Annotated[Path, typer.Argument(help="Where the two files go; made with mode 0700 where it is missing.")],
    name: Annotated[str, typer.Option(help="Of the files: NAME.key (public) and NAME.key_secret.")] = "refitd",
) -> None:
    """Makes a pair of CURVE keys, for a daemon or for a client that connects over TCP."""
    from refitd.curve import write_keys
    from refitd.endpoint import EndpointError

    try:
        public, secret = write_keys(directory, name)
    except (EndpointError, OSError) as error:
        _fail(str(error), 2)
    typer.echo(f"public key: {public} (a client's goes into the daemon's server.curve_clients directory)")
    typer.echo(f"secret key: {secret} (keep it where it is used; a daemon's is server.curve_secret_key)")


@dataclass(frozen=True)
class Reach:
    """How to reach a daemon that runs: where it listens, and with which keys over TCP."""

    endpoint: str
    curve: CurveKeys | None = None

    def connect(self, client: str, timeout_seconds: float = 10.0) -> Daemon:
        from refit_trainer import Daemon

        return Daemon.connect(self.endpoint, timeout_seconds, client=client, curve=self.curve)


def _reach(endpoint: str | None, keys: Path | None, server_key: str | None) -> Reach:
    """From the options of a command; ends with exit code 2 where they do not fit together."""
    where = endpoint or default_endpoint(os.environ, os.getuid())
    if not where.startswith("tcp://"):
        if keys is not None or server_key is not None:
            _fail(f"--keys and --server-key are for tcp:// endpoints, and this one is {where}", 2)
        return Reach(where)
    if keys is None or server_key is None:
        _fail(
            f"{where} needs --keys FILE (this client's NAME.key_secret, made by refitd keygen) "
            "and --server-key FILE_OR_KEY (the daemon's public key)",
            2,
        )
    return Reach(where, _curve_keys(keys, server_key))


def _curve_keys(keys: Path, server_key: str) -> CurveKeys:
    from refit_trainer import CurveKeys
    from refitd.curve import private_pair, public_key
    from refitd.endpoint import EndpointError

    try:
        return CurveKeys(public_key(server_key, "--server-key"), *private_pair(keys, "--keys"))
    except EndpointError as error:
        _fail(str(error), 2)


def _found(reach: Reach) -> Subject:
    """Without a configuration: what a trainer here would use."""
    from refitd.doctor import Subject

    return Subject(
        os.environ, reach.endpoint, default_directory(os.environ, os.getuid()), _status_or_none(reach, "refitd doctor")
    )


def _configured(flags: dict[str, Any], file: Path | None, keys: Path | None, server_key: str | None) -> Subject:
    """Exactly what a daemon started with these would use."""
    from refitd.config import ConfigError, load_config
    from refitd.doctor import Subject
    from refitd.doctor.configured import check_configuration

    try:
        config = load_config(flags, file)
    except ConfigError as error:
        _fail(str(error), 2)
    # Before a start there may be no client's keys yet.
    unasked = config.endpoint.startswith("tcp://") and keys is None and server_key is None
    daemon = None if unasked else _status_or_none(_reach(config.endpoint, keys, server_key), "refitd doctor")
    checked = list(check_configuration(config, os.environ, daemon))
    return Subject(os.environ, config.endpoint, config.runtime_directory, daemon, checked)


def _ask_status(reach: Reach) -> Status:
    from refit_trainer import RefitdError

    try:
        with reach.connect("refitd status", timeout_seconds=5.0) as daemon:
            return daemon.status()
    except RefitdError as error:
        _fail(str(error), 1)


def _status_or_none(reach: Reach, client: str) -> Status | None:
    from refit_trainer import RefitdError

    try:
        with reach.connect(client, timeout_seconds=2.0) as daemon:
            return daemon.status()
    except RefitdError:
        return None


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


def _check_loadable(config: Config) -> None:
    """What cannot be loaded must not cost a model load to find out."""
    from refitd.config import ConfigError
    from refitd.loadable import load_problem
    from refitd.room import is_cpu_build

    if problem := load_problem(config, on_cpu=is_cpu_build()):
        raise ConfigError(problem)


def _fail(message: str, code: int) -> NoReturn:
    print(f"refitd: {message}", file=sys.stderr)  # noqa: T201 - the one line an operator sees
    sys.exit(code)


def main() -> None:
    """The console script."""
    try:
        app()
    except ModuleNotFoundError as error:
        if error.name not in SERVICE_MODULES:
            raise
        _fail("for this the service has to be installed: pip install 'refitd[cpu]' (or [cuda12], [cuda13])", 1)
