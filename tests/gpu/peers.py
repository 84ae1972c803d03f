"""A trainer in a process of its own, which a test tells what to do: CUDA IPC never works inside one process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from refitd.parent_death import PARENT_VARIABLE, ProcessIdentity, install_from_environment


class Peer:
    """Runs `main(connection, *arguments)` in a fresh process; `ask` sends it an object and returns its answer."""

    def __init__(self, main: Callable[..., None], *arguments: Any, environment: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        parent = ProcessIdentity.of(os.getpid())
        self._connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_run, args=(main, theirs, environment or {}, parent, arguments), daemon=True
        )
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, order: Any) -> None:
        """Its answer is to be fetched later."""
        self._connection.send(order)

    def ask(self, question: Any, timeout_seconds: float = 120.0) -> Any:
        self.tell(question)
        return self.answer(timeout_seconds)

    def answer(self, timeout_seconds: float = 120.0) -> Any:
        assert self._connection.poll(timeout_seconds), f"the peer did not answer within {timeout_seconds:g} s"
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.join()

    def stop(self) -> None:
        self._connection.close()
        self.process.join(20)
        if self.process.is_alive():
            self.kill()


@contextmanager
def peer(main: Callable[..., None], *arguments: Any, environment: dict[str, str] | None = None) -> Iterator[Peer]:
    """Ended on leaving, also after a failure."""
    started = Peer(main, *arguments, environment=environment)
    try:
        yield started
    finally:
        started.stop()


def _run(
    main: Callable[..., None],
    connection: Connection,
    environment: dict[str, str],
    parent: ProcessIdentity,
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    # A parent that is killed ends nobody, and a process that waits for NCCL would hold its device for ever.
    install_from_environment({PARENT_VARIABLE: str(parent)})
    try:
        main(connection, *arguments)
    except EOFError:
        return
    except BaseException as error:
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise
