"""O4: after every hostile case the daemon is healthy, a fixed prompt gives the same ids, and the version has not
moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from refit_protocol.states import EngineState
from refit_trainer import Daemon, Sampling

PROMPT = [17, 230, 99, 4]
SAMPLING = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


def sing(daemon: Daemon) -> tuple[list[int], int, str | None]:
    """Ids of the fixed prompt, the version and the digest that are served."""
    sample = daemon.generate_one(PROMPT, SAMPLING)
    status = daemon.status()
    assert status.state is EngineState.READY
    return sample.token_ids.tolist(), status.version, status.digest


@contextmanager
def unharmed(daemon: Daemon) -> Iterator[None]:
    """What happens inside must leave the daemon exactly as it was."""
    before = sing(daemon)
    yield
    assert sing(daemon) == before
