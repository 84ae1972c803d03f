"""Preflight: every reason why a daemon could not start or a trainer could not share memory with it, and what to do.

Works before a daemon starts (where the service will run) and against a running one (where the trainer runs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from refit_protocol.messages import Status
from refitd import __version__
from refitd.doctor.devices import Gpu, check_devices, check_same_devices, read_gpus, visible_uuids
from refitd.doctor.finding import Finding, skipped
from refitd.doctor.host import check_host
from refitd.doctor.neighbour import check_daemon_process, check_versions
from refitd.doctor.places import check_orphans, check_runtime_directory, check_socket
from refitd.doctor.sharing import check_cuda_sharing, check_memfd_sharing
from refitd.doctor.software import check_software


@dataclass(frozen=True)
class Subject:
    """What is to be examined. `daemon` is the status of the one that answers at `endpoint`, None where none does.

    `configured` is what was found of the model and the configuration that were named.
    """

    environment: Mapping[str, str]
    endpoint: str
    runtime_directory: Path
    daemon: Status | None = None
    configured: Sequence[Finding] = (skipped("model", "none is named: --model or --config"),)


def examine(subject: Subject) -> Iterator[Finding]:
    """All findings, as they are made: some take seconds."""
    gpus = read_gpus()
    cuda = bool(visible_uuids(gpus, subject.environment))
    yield from check_software(cuda=cuda)
    yield from check_devices(gpus, subject.environment)
    yield from check_host(subject.environment, cuda=cuda)
    yield check_memfd_sharing()
    if cuda:
        yield check_cuda_sharing()
    yield check_socket(subject.endpoint, answered=subject.daemon is not None)
    yield from subject.configured
    if subject.daemon is None:
        yield from _before_the_start(subject, gpus)
    else:
        yield from _beside_a_daemon(subject.daemon, subject, gpus)


def _before_the_start(subject: Subject, gpus: list[Gpu]) -> Iterator[Finding]:
    yield check_runtime_directory(subject.runtime_directory)
    yield check_orphans(subject.runtime_directory, visible_uuids(gpus, subject.environment))
    keys = " (as with missing or wrong CURVE keys)" if _over_tcp(subject.endpoint) else ""
    silence = f"none answers at {subject.endpoint}{keys}: whether a trainer here fits to it is not known"
    yield skipped("daemon", silence)


def _beside_a_daemon(daemon: Status, subject: Subject, gpus: list[Gpu]) -> Iterator[Finding]:
    for check in ("runtime directory", "orphans"):
        yield skipped(check, "a daemon has started here")
    yield check_versions(daemon.daemon_version, __version__)
    if _over_tcp(subject.endpoint):
        yield skipped("daemon", "over TCP no memory is lent: it may be on another machine, with other devices")
        return
    yield from check_daemon_process(daemon.pid, subject.endpoint)
    yield from check_same_devices(daemon.devices, gpus, subject.environment)


def _over_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")
