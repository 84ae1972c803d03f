"""How tests are divided among the processes of `pytest -n`."""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadFileScheduling

# All of one folder use one costly thing: an engine of two workers, a booted systemd, models, the GPU.
TOGETHER = frozenset({"tests/gpu", "tests/parallel", "tests/service", "tests/worker"})


class ByFile(LoadFileScheduling):
    """Each file is a process' own, since its tests share a daemon and have an order, and so are some folders."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        folder = str(PurePosixPath(file).parent)
        return folder if folder in TOGETHER else file
