"""What the configured model and engine need: the very checks that a start makes before it loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from refit_protocol.messages import Status
from refitd.config import Config
from refitd.doctor.finding import Finding, failed, passed, skipped
from refitd.doctor.places import check_port
from refitd.loadable import load_problem, model_directory
from refitd.room import is_cpu_build, room_problem


def check_configuration(config: Config, environment: Mapping[str, str], daemon: Status | None) -> Iterator[Finding]:
    """`daemon`: the one that answers at the configured endpoint, None where none does."""
    yield check_model(config, on_cpu=is_cpu_build())
    if daemon is not None:
        yield skipped("memory", "the daemon that answers at this endpoint has taken what it needs")
        return
    yield check_room(config, environment)
    if config.http.enabled and config.http.port:
        yield check_port(config.http.host, config.http.port)


def check_model(config: Config, *, on_cpu: bool) -> Finding:
    problem = load_problem(config, on_cpu=on_cpu)
    if problem is not None:
        return failed("model", problem, "correct the configuration, or fetch the model's files again")
    directory = model_directory(config)
    return passed("model", f"{config.model} is for vLLM to find" if directory is None else str(directory))


def check_room(config: Config, environment: Mapping[str, str]) -> Finding:
    problem = room_problem(config, environment)
    if problem is None:
        return passed("memory", "free for the configured engine")
    return failed("memory", problem, "what is here now counts: end what is no longer needed")
