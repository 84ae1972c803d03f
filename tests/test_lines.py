"""Direct lines to workers: real sockets and threads; here the worker is an object with two methods."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from refitd.config import Config
from refitd.engine import AWAKE_SECONDS
from refitd.lines import MAX_MESSAGE_BYTES, LineClosedError, Lines, encoded, open_lines
from refitd.worker.boundary import Turns
from refitd.worker.line import _serve, open_line
from tests.scripted_app import ScriptedEngine
from tests.waiting import until


@dataclass
class Rank:
    """A worker of an engine."""

    rank: int
    device: Any = field(default_factory=lambda: SimpleNamespace(type="cpu"))

    def refitd_add(self, one: int, other: int) -> dict[str, Any]:
        return {"sum": one + other + self.rank, "thread": threading.current_thread().name}


@dataclass
class Stage(Rank):
    """A worker that notes what it is asked for."""

    rank: int = 0
    seen: list[str] = field(default_factory=list)

    def refitd_rehearse(self, source: int) -> dict[str, Any]:
        self.seen.append(f"rehearsed {source}")
        return {}

    def refitd_play(self) -> dict[str, Any]:
        self.seen.append("played")
        return {}


async def opened(*ranks: Rank) -> Lines:
    async def ask(path: str) -> list[dict[str, Any]]:
        for rank in ranks:
            open_line(rank, path)
        return [{"open": True} for _ in ranks]

    return await open_lines(len(ranks), ask)


def message(method: str, *arguments: Any) -> bytes:
    packed = encoded(method, arguments)
    assert packed is not None
    return packed


def test_every_worker_answers_in_the_order_of_ranks_and_calls() -> None:
    """Whichever worker connected first; and the answers come from a thread of the line's own."""

    async def scenario() -> None:
        lines = await opened(Rank(10), Rank(0))
        try:
            answers = await asyncio.gather(*[lines.call(message("refitd_add", number, 1)) for number in range(50)])
        finally:
            lines.close()
        assert [[answer["sum"] for answer in both] for both in answers] == [[n + 1, n + 11] for n in range(50)]
        assert {answer["thread"] for both in answers for answer in both} == {"refitd-line"}

    asyncio.run(scenario())


def test_whoever_waits_for_a_worker_that_is_gone_is_told() -> None:
    """The call under way, the calls behind it and the later ones fail; none waits."""

    async def scenario() -> None:
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        async def ask(path: str) -> list[dict[str, Any]]:
            silent.connect(path)
            silent.send(msgspec.msgpack.encode(0))
            return [{"open": True}]

        lines = await open_lines(1, ask)
        try:
            under_way = [lines.call(message("refitd_add", 1, 1)) for _ in range(2)]
            silent.close()
            for call in under_way:
                with pytest.raises(LineClosedError):
                    await call
            with pytest.raises(LineClosedError):
                await lines.call(message("refitd_add", 1, 1))
        finally:
            lines.close()

    asyncio.run(scenario())


def test_a_call_that_nobody_awaits_any_more_does_not_shift_the_answers() -> None:
    """Each answer goes to the call it belongs to."""

    async def scenario() -> None:
        lines = await opened(Rank(0))
        try:
            lines.call(message("refitd_add", 1, 1)).cancel()
            assert [answer["sum"] for answer in await lines.call(message("refitd_add", 2, 2))] == [4]
        finally:
            lines.close()

    asyncio.run(scenario())


class Busy(Rank):
    """A worker that answers nothing until it may."""

    def __init__(self) -> None:
        super().__init__(0)
        self.may_answer = threading.Event()

    def refitd_count(self, filler: str, number: int) -> dict[str, Any]:
        assert self.may_answer.wait(60)
        return {"number": number, "length": len(filler)}


def test_calls_wait_in_order_for_a_worker_that_has_no_room_for_more() -> None:
    """Buckets sent one behind the other while the first is still copied: the socket takes a few, others wait here."""

    async def scenario() -> None:
        busy = Busy()
        lines = await opened(busy)
        try:
            calls = [lines.call(message("refitd_count", "x" * 60_000, number)) for number in range(40)]
            await asyncio.sleep(0)
            assert not any(call.done() for call in calls)
            busy.may_answer.set()
            answers = [answer for [answer] in await asyncio.gather(*calls)]
        finally:
            lines.close()
        assert answers == [{"number": number, "length": 60_000} for number in range(40)]

    asyncio.run(scenario())


@pytest.mark.parametrize("device", ["cpu", "GPU-1"])
def test_workers_rehearse_only_where_they_are_called_directly(tmp_path: Path, device: str) -> None:
    """Before what is asked of them next, which does not wait for more than that; on a CPU never."""

    async def scenario() -> None:
        stage = Stage()
        engine = ScriptedEngine(Config(model="scripted", endpoint=f"ipc://{tmp_path}/s", runtime_directory=tmp_path))
        await engine.load()
        engine._awake_seconds = AWAKE_SECONDS if device != "cpu" else 0.0
        engine.rehearse_in_workers(1)
        engine._lines = await opened(stage)
        try:
            engine.rehearse_in_workers(2)
            await engine.settle(60.0)
            engine.rehearse_in_workers(3)
            await engine.call_workers("refitd_play", timeout_seconds=60.0, direct=True)
        finally:
            engine._lines.close()
        assert stage.seen == (["rehearsed 3", "played"] if device != "cpu" else ["played"])
        assert engine.script.calls == ["is_sleeping"]

    asyncio.run(scenario())


def test_a_rehearsal_that_is_not_answered_any_more_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it asked for is asked again by the calls behind it, and these are told."""

    async def scenario() -> None:
        engine = ScriptedEngine(Config(model="scripted", endpoint=f"ipc://{tmp_path}/s", runtime_directory=tmp_path))
        await engine.load()
        engine._awake_seconds = AWAKE_SECONDS
        engine._lines = await opened(Stage())
        await engine.settle(60.0)
        engine.rehearse_in_workers(1)
        engine._lines.close()
        await asyncio.sleep(0)

    asyncio.run(scenario())
    gc.collect()
    assert not caplog.records


def test_calls_that_take_the_long_way_behind_one_on_a_line_keep_their_order(tmp_path: Path) -> None:
    """Also where one is made at the very moment at which that is answered, as what a bucket's failure leads to is."""

    async def scenario() -> None:
        busy = Busy()
        engine = ScriptedEngine(Config(model="scripted", endpoint=f"ipc://{tmp_path}/s", runtime_directory=tmp_path))
        await engine.load()
        engine._lines = await opened(busy)
        await engine.settle(60.0)
        try:
            call = partial(engine.call_workers, timeout_seconds=60.0, direct=True)
            short = asyncio.create_task(call("refitd_count", "", 0))
            await asyncio.sleep(0)
            too_large = asyncio.create_task(call("refitd_too_large", "x" * (64 << 10)))

            async def behind() -> None:
                await short
                await call("refitd_behind")

            last = asyncio.create_task(behind())
            await asyncio.sleep(0)
            busy.may_answer.set()
            await asyncio.gather(too_large, last)
        finally:
            engine._lines.close()
        assert engine.script.calls == ["is_sleeping", "refitd_too_large", "refitd_behind"]

    asyncio.run(scenario())


def test_while_the_loop_is_awake_for_an_answer_something_is_done(tmp_path: Path) -> None:
    """Here it is what lets the worker answer."""

    async def scenario() -> None:
        busy = Busy()
        engine = ScriptedEngine(Config(model="scripted", endpoint=f"ipc://{tmp_path}/s", runtime_directory=tmp_path))
        await engine.load()
        engine._lines, engine._awake_seconds, engine.meanwhile = await opened(busy), 60.0, busy.may_answer.set
        await engine.settle(60.0)
        try:
            [answer] = await engine.call_workers("refitd_count", "", 7, timeout_seconds=60.0, direct=True)
        finally:
            engine._lines.close()
        assert answer == {"number": 7, "length": 0}

    asyncio.run(scenario())


class Patient(Rank):
    """A worker whose calls wait for what the test lets happen, in turns."""

    def __init__(self) -> None:
        super().__init__(0)
        self.begun: list[int] = []
        self.may_end = {number: threading.Event() for number in range(3)}

    def refitd_apply_in_turns(self, number: int) -> Turns:
        self.begun.append(number)
        while not self.may_end[number].is_set():
            yield
        return {"number": number}

    def refitd_begun(self) -> dict[str, Any]:
        return {"begun": self.begun}


def test_a_call_that_waits_lets_the_next_one_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the answers come in the order of the calls, whichever ends first; a call that takes no turns is the last."""

    async def scenario() -> None:
        worker = Patient()
        lines = await opened(worker)
        try:
            calls = [lines.call(message("refitd_apply", number)) for number in range(3)]
            behind = lines.call(message("refitd_begun"))
            await asyncio.to_thread(until, lambda: len(worker.begun) == 3, "all three to begin")
            for number in (2, 1):
                worker.may_end[number].set()
            assert not any(call.done() for call in [*calls, behind])
            worker.may_end[0].set()
            assert [answer["number"] for [answer] in await asyncio.gather(*calls)] == [0, 1, 2]
            assert (await behind)[0]["begun"] == [0, 1, 2]
        finally:
            lines.close()

    monkeypatch.setattr("refitd.worker.line.AWAKE_SECONDS", 0.001)
    asyncio.run(scenario())


class Prompt(Rank):
    """A worker whose calls need one turn."""

    def refitd_apply_in_turns(self, number: int) -> Turns:
        return {"number": number}
        yield


def test_messages_that_keep_coming_keep_no_answer_waiting() -> None:
    """There is never a moment without a message here, and then the daemon hangs up."""
    daemons, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with daemons:
        for number in range(5):
            daemons.send(message("refitd_apply", number))
        daemons.shutdown(socket.SHUT_WR)
        _serve(Prompt(0), workers)
        answers = [msgspec.msgpack.decode(daemons.recv(MAX_MESSAGE_BYTES)[1:]) for _ in range(5)]
        assert [answer["number"] for answer in answers] == [0, 1, 2, 3, 4]
        assert daemons.recv(1) == b""


def test_calls_that_were_not_sent_yet_fail_with_the_line() -> None:
    """Those the worker has never seen are told like the others, and nothing is left behind."""

    async def scenario() -> None:
        busy = Busy()
        lines = await opened(busy)
        calls = [lines.call(message("refitd_count", "x" * 60_000, number)) for number in range(40)]
        lines.close()
        busy.may_answer.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {LineClosedError}

    asyncio.run(scenario())


class Wordy(Rank):
    """A worker whose refusals quote a lot."""

    def refitd_refuse(self, names: int) -> dict[str, Any]:
        quoted = ["\N{SNOWMAN}" * 1000] * names
        error = {"code": "manifest_mismatch", "message": ", ".join(quoted), "details": {"unexpected": quoted}}
        return {"error": error, "wrote": False}


def test_a_refusal_too_large_for_a_message_comes_without_its_details() -> None:
    """Cut off by the socket it would be no answer at all, and the engine would pass for dead."""

    async def scenario() -> None:
        lines = await opened(Wordy(0))
        try:
            [[short], [long]] = [await lines.call(message("refitd_refuse", names)) for names in (1, 100)]
        finally:
            lines.close()
        assert len(short["error"]["details"]["unexpected"]) == 1
        assert (long["error"]["code"], long["error"]["details"], long["wrote"]) == ("manifest_mismatch", {}, False)
        assert long["error"]["message"].startswith("\N{SNOWMAN}")

    asyncio.run(scenario())


class Thorough(Rank):
    """A worker that names every tensor."""

    def refitd_list(self, size_bytes: int) -> dict[str, Any]:
        return {"loader_tensors": "x" * size_bytes}


# The largest that fill one and two pieces, and a byte less or more: the marker takes one of each piece, and message
# pack adds 19 bytes to a short text and 21 to a long one.
ONE_PIECE = MAX_MESSAGE_BYTES - 1 - 19
TWO_PIECES = 2 * (MAX_MESSAGE_BYTES - 1) - 21


@pytest.mark.parametrize(
    "size_bytes", [3_000_000, *(full + more for full in (ONE_PIECE, TWO_PIECES) for more in (-1, 0, 1))]
)
def test_an_answer_may_be_of_any_length(size_bytes: int) -> None:
    """The next call's answer is not taken for its rest."""

    async def scenario() -> None:
        lines = await opened(Thorough(0))
        try:
            calls = [lines.call(message("refitd_list", size_bytes)), lines.call(message("refitd_add", 1, 1))]
            [[long], [short]] = await asyncio.gather(*calls)
        finally:
            lines.close()
        assert (len(long["loader_tensors"]), short["sum"]) == (size_bytes, 2)

    asyncio.run(scenario())


@pytest.mark.parametrize("said", [b"\1", b"\1\xc1", b"\1\1", b"\1\x80\x80"])
def test_what_is_no_answer_ends_the_line(said: bytes) -> None:
    """Nobody waits for the answer that it should have been."""

    async def scenario() -> None:
        worker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        async def ask(path: str) -> list[dict[str, Any]]:
            worker.connect(path)
            worker.send(msgspec.msgpack.encode(0))
            return [{"open": True}]

        lines = await open_lines(1, ask)
        with worker:
            call = lines.call(message("refitd_add", 1, 1))
            worker.send(said)
            with pytest.raises(LineClosedError, match="no answer"):
                await call
        lines.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("said", [b"hello", msgspec.msgpack.encode(0)])
def test_a_stranger_that_connects_instead_of_a_worker_leaves_no_lines(said: bytes) -> None:
    """Whether it says nonsense or the rank of another: the engine then calls through vLLM."""

    async def scenario() -> None:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        async def ask(path: str) -> list[dict[str, Any]]:
            open_line(Rank(0), path)
            stranger.connect(path)
            stranger.send(said)
            return [{"open": True}] * 2

        with stranger:
            with pytest.raises(ConnectionError):
                await open_lines(2, ask)
            assert stranger.recv(1) == b"", "its end is still open"

    asyncio.run(scenario())


def test_a_worker_that_cannot_connect_leaves_no_lines() -> None:
    """As one on another host."""

    async def scenario() -> None:
        async def ask(_path: str) -> list[dict[str, Any]]:
            return [{"open": False}]

        with pytest.raises(ConnectionError):
            await open_lines(1, ask)

    asyncio.run(scenario())


def test_a_call_too_large_for_a_message_is_not_encoded() -> None:
    """The engine then calls through vLLM."""
    assert encoded("refitd_add", ["x" * MAX_MESSAGE_BYTES]) is None
