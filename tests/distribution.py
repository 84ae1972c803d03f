"""How tests are divided among the processes of `pytest -n`."""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# All of one folder use one costly thing: an engine of two workers, a booted systemd, models, the GPU.
TOGETHER = frozenset({"tests/gpu", "tests/parallel", "tests/service", "tests/worker"})
# What starts engines of its own or trains: begun late, it would leave one process alone at the end.
LONGEST = (
    "tests/service",
    "tests/parallel",
    "tests/worker",
    "tests/fleet/test_three_daemons.py",
    "tests/cases/test_torn.py",
    "tests/generation/test_adapters.py",
    "tests/test_demo.py",
    "tests/collective/test_remote.py",
    "tests/trainer/test_generation_worker.py",
    "tests/http/test_parsers.py",
    "tests/examples/test_grpo.py",
)


class ByFile(LoadFileScheduling):
    """Each file is a process' own, since its tests share a daemon and have an order, and so are some folders."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        folder = str(PurePosixPath(file).parent)
        return folder if folder in TOGETHER else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        """The longest first, then those of most tests."""
        longest = next((scope for scope in LONGEST if scope in self.workqueue), None)
        if longest is not None:
            self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
