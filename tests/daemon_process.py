"""A real daemon as a child process of the tests: started, watched, ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from refit_protocol.messages import Status
from refit_protocol.states import EngineState
from refit_trainer import Daemon, RefitdError
from refit_trainer.link import CurveKeys
from refitd import temporary
from tests.waiting import until

START_SECONDS = 240.0
STOP_SECONDS = 30.0
# Of every process of the tests, and every engine of the benchmarks. Tiny models gain nothing from a second thread, and
# its spinning takes a core from all others. PyTorch need not find out with a compiler, in each engine's start, what
# this processor can.
SPARING = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
SMALL_ENGINE = (
    "engine.enforce_eager=true",
    "engine.cpu_kv_cache_gib=1",
    "engine.max_model_len=256",
    "engine.max_num_seqs=64",
    "engine.extra={num_gpu_blocks_override = 512}",
)


@dataclass(frozen=True)
class DaemonProcess:
    """`endpoint` is where it listens, `log` what it wrote, `curve` the keys of its clients over TCP."""

    process: subprocess.Popen[bytes]
    endpoint: str
    log: Path
    curve: CurveKeys | None = None

    def connect(self, client: str = "test", **options: object) -> Daemon:
        return Daemon.connect(self.endpoint, client=client, curve=self.curve, **options)

    def status(self) -> Status:
        with self.connect() as daemon:
            return daemon.status()

    def engine_pids(self) -> list[int]:
        """All living descendants of the daemon."""
        return descendants(self.process.pid)

    def load_and_watch(self) -> list[Status]:
        """Has a deferred load done; what the status said meanwhile, each time that it said something new."""
        seen: list[Status] = []
        with self._connect_early() as watching, self._connect_early() as asking:
            loading = threading.Thread(target=asking.load_model)
            loading.start()
            while loading.is_alive():
                loading.join(0.02)
                status = watching.status()
                if not seen or (status.load_phase, status.progress) != (seen[-1].load_phase, seen[-1].progress):
                    seen.append(status)
            return [*seen, watching.status()]

    def _connect_early(self) -> Daemon:
        """Also before it listens."""
        return self.connect(timeout_seconds=START_SECONDS)

    def wait_ready(self) -> None:
        """Raises AssertionError with the log when it ends or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the daemon ended: {self.log.read_text()[-4000:]}"
            if self._state() is EngineState.READY:
                return
            self._wait_briefly()
        raise AssertionError(f"not ready in {START_SECONDS} s: {self.log.read_text()[-4000:]}")

    @property
    def temporary_directory(self) -> Path:
        """Where its engine puts temporary files."""
        record = msgspec.json.decode((self.log.parent / temporary.RECORD_NAME).read_bytes())
        return Path(record["directory"])

    def stop(self) -> int:
        """One that was killed leaves its temporary files to the next daemon, which may never come."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            temporary.clear(self.log.parent)

    def _state(self) -> EngineState | None:
        try:
            return self.status().state
        except RefitdError:
            return None

    def _wait_briefly(self) -> None:
        try:
            self.process.wait(0.3)
        except subprocess.TimeoutExpired:
            return


@contextmanager
def running_daemon(model: Path, directory: Path, *settings: str, wait: bool = True) -> Iterator[DaemonProcess]:
    """A daemon for `model` with its runtime directory in `directory`; ended on leaving, also after a failure."""
    with ended(start_daemon(model, directory, *settings)) as daemon:
        if wait:
            daemon.wait_ready()
        yield daemon


@contextmanager
def ended(daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """Ends it on leaving, also after a failure."""
    try:
        yield daemon
    finally:
        daemon.stop()


def start_daemon(
    model: Path, directory: Path, *settings: str, endpoint: str | None = None, curve: CurveKeys | None = None
) -> DaemonProcess:
    """`endpoint` None is a socket in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    endpoint = endpoint or f"ipc://{directory}/refitd.sock"
    log = directory / "daemon.log"
    options = [argument for setting in (*SMALL_ENGINE, *settings) for argument in ("--set", setting)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "refitd", "serve", "--model", str(model), "--endpoint", endpoint, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **SPARING, "HF_HUB_OFFLINE": "1", "REFITD_RUNTIME_DIRECTORY": str(directory)},
        )
    return DaemonProcess(process, endpoint, log, curve)


@contextmanager
def standing_still(*pids: int) -> Iterator[None]:
    """Stops these processes, and lets them go on afterwards, also after a failure."""
    try:
        for pid in pids:
            stop(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def stop(pid: int) -> None:
    """Returns once it stands still: on a busy machine its threads run on for a while after the signal was sent."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _thread_states(pid) <= {"T", None}, f"process {pid} to stand still")


def _thread_states(pid: int) -> set[str | None]:
    return {_state(path) for path in Path(f"/proc/{pid}/task").glob("*/stat")}


def _state(stat: Path) -> str | None:
    """Of a process or thread, None if it is gone; its name, the field before, may hold any letters: see proc(5)."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def descendants(pid: int) -> list[int]:
    """Living children of `pid` and theirs; zombies are dead."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            found.append(child)
            waiting.append(child)
    return [child for child in found if is_alive(child)]


def is_alive(pid: int) -> bool:
    return _state(Path(f"/proc/{pid}/stat")) not in ("Z", "X", None)


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
