"""Case E: input made to break the daemon. After each the canary sings the same song."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import msgpack
import numpy as np
import pytest

from refit_protocol.codec import MAGIC
from refit_protocol.errors import ErrorCode
from refit_protocol.messages import AcquireWriter, Failed, Generate, Hello, OpenSource, Sampling, WriterAcquired
from refit_protocol.tensors import DType, MemfdSegment, SourceTensor
from refit_trainer import Daemon
from refitd.config import ServerConfig
from tests.canary import unharmed
from tests.daemon_process import DaemonProcess
from tests.wire import raw_client


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_any_frame_is_refused_and_never_loaded(
    daemon: Daemon, daemon_process: DaemonProcess, tmp_path: Path
) -> None:
    """Pickles as magic, header and blob get a typed refusal; their payload never runs."""
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    with unharmed(daemon), raw_client(daemon_process.endpoint) as client:
        for frames in ([b"", bomb], [b"", MAGIC, bomb], [bomb], [b"", bomb, bomb, bomb]):
            reply = client.send_frames(frames).body
            assert isinstance(reply, Failed)
            assert reply.code is ErrorCode.MALFORMED_MESSAGE
        client.hello()
        refused = client.refused(Generate(prompt_lengths=[len(bomb) // 4], stream=False), [bomb])
        assert refused.code is ErrorCode.INVALID_PROMPT
    assert not (tmp_path / "exploded").exists()


BOMBS = {
    "array of 2^32 - 1": b"\xdd\xff\xff\xff\xff",
    "100,000 levels": b"\x91" * 100_000 + b"\xc0",
    "integer keys": b"\x81\x01\x02",
    "bad utf-8": b"\xa2\xff\xfe",
    "trailing bytes": msgpack.packb({"id": 1}) + b"\x00",
    "duplicate keys": b"\x82\xa2id\x01\xa2id\x02",
    "unknown extension": b"\xd4\x2a\x00",
    "timestamp": b"\x81\xa2id\xd6\xff\x00\x00\x00\x01",
    "a megabyte of nested arrays": b"\xdd" + struct.pack(">I", 1 << 20) + b"\x90" * (1 << 20),
    "empty": b"",
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_message_pack_bombs_get_one_refusal(daemon: Daemon, daemon_process: DaemonProcess, name: str) -> None:
    """Each gets exactly one typed reply."""
    with unharmed(daemon), raw_client(daemon_process.endpoint) as client:
        reply = client.send_frames([b"", MAGIC, BOMBS[name]]).body
        assert isinstance(reply, Failed)
        assert reply.code in (ErrorCode.MALFORMED_MESSAGE, ErrorCode.MESSAGE_TOO_LARGE)


@pytest.mark.parametrize("ids", [[-1], [512], [5, 2**31 - 1], [5, -(2**31), 7]])
def test_an_id_outside_the_vocabulary_is_refused(daemon: Daemon, daemon_process: DaemonProcess, ids: list[int]) -> None:
    """Such an id would kill the engine for everybody; only this request is refused, naming the id."""
    blob = np.array(ids, dtype="<i4").tobytes()
    with unharmed(daemon), raw_client(daemon_process.endpoint) as client:
        client.hello()
        refused = client.refused(Generate(prompt_lengths=[len(ids)], stream=False), [blob])
        assert refused.code is ErrorCode.INVALID_PROMPT


@pytest.mark.parametrize(
    ("lengths", "blob"),
    [([], b""), ([0], b""), ([1, 0], bytes(4)), ([2], bytes(4)), ([-1, 2], bytes(4)), ([1], bytes(3))],
)
def test_empty_and_misdeclared_prompts_are_refused(
    daemon: Daemon, daemon_process: DaemonProcess, lengths: list[int], blob: bytes
) -> None:
    """No prompt, an empty prompt, and lengths that do not fit the blob."""
    with unharmed(daemon), raw_client(daemon_process.endpoint) as client:
        client.hello()
        assert client.refused(Generate(prompt_lengths=lengths, stream=False), [blob]).code is ErrorCode.INVALID_PROMPT


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=0),
        Sampling(n=0),
        Sampling(temperature=-1.0),
        Sampling(top_p=2.0),
        Sampling(stop_token_ids=[512]),
        Sampling(logit_bias=[(-1, 1.0)]),
        Sampling(allowed_token_ids=[9999]),
        Sampling(logprobs=21),
        Sampling(repetition_penalty=0.0),
    ],
)
def test_impossible_sampling_is_refused(daemon: Daemon, daemon_process: DaemonProcess, sampling: Sampling) -> None:
    """Values vLLM would refuse, or choke on, are refused for this request alone."""
    with unharmed(daemon), raw_client(daemon_process.endpoint) as client:
        client.hello()
        refused = client.refused(Generate(prompt_lengths=[1], sampling=sampling, stream=False), [bytes(4)])
        assert refused.code is ErrorCode.INVALID_SAMPLING


def test_another_protocol_version_is_refused(daemon_process: DaemonProcess) -> None:
    """The refusal names what the daemon speaks."""
    with raw_client(daemon_process.endpoint) as client:
        refused = client.refused(Hello(protocol_versions=[2, 3], client="from the future"))
        assert refused.code is ErrorCode.UNSUPPORTED_VERSION
        assert refused.details["supported"] == [1]


def descriptor(**changes: object) -> SourceTensor:
    fields = {"name": "w", "dtype": DType.BFLOAT16, "shape": (4, 4), "segment": 0, "offset_bytes": 0}
    return SourceTensor(**{**fields, **changes})  # type: ignore[arg-type]


ABUSED = {
    "negative shape": [descriptor(shape=(-4, 4))],
    "shape of 2^63": [descriptor(shape=(2**63 - 1, 1))],
    "overflowing product": [descriptor(shape=(2**31, 2**31, 2**31))],
    "offset behind the end": [descriptor(offset_bytes=4096)],
    "offset and length overflow": [descriptor(offset_bytes=2**62)],
    "negative offset": [descriptor(offset_bytes=-2)],
    "odd offset": [descriptor(offset_bytes=1)],
    "duplicate names": [descriptor(), descriptor(offset_bytes=32)],
    "overlaps itself": [descriptor(strides=(1, 1))],
    "unknown segment": [descriptor(segment=1)],
    "no name": [descriptor(name="")],
}


@pytest.mark.parametrize("name", list(ABUSED))
def test_abused_descriptors_are_refused_before_any_mapping(
    daemon: Daemon, daemon_process: DaemonProcess, name: str
) -> None:
    """Arithmetic alone refuses them: the segment named here does not even exist."""
    segment = MemfdSegment(pid=os.getpid(), fd=1_000_000, inode=1, size_bytes=4096)
    with unharmed(daemon), raw_client(daemon_process.endpoint) as client:
        client.hello(pid=os.getpid())
        epoch = client.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
        refused = client.refused(OpenSource(epoch=epoch, kind="inplace", segments=[segment], tensors=ABUSED[name]))
        assert refused.code is ErrorCode.INVALID_DESCRIPTOR


def test_memory_that_cannot_be_opened_is_said(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """A descriptor that names no open memfd of the peer is a typed refusal."""
    segment = MemfdSegment(pid=os.getpid(), fd=1_000_000, inode=1, size_bytes=4096)
    with unharmed(daemon), raw_client(daemon_process.endpoint) as client:
        client.hello(pid=os.getpid())
        epoch = client.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
        refused = client.refused(OpenSource(epoch=epoch, kind="bucket", segments=[segment]))
        assert refused.code is ErrorCode.MEMORY_UNAVAILABLE


def test_more_segments_than_the_daemon_opens_are_refused(daemon: Daemon, daemon_process: DaemonProcess) -> None:
    """Each would take a mapping in every worker: the limit is named, and nothing has been opened."""
    segment = MemfdSegment(pid=os.getpid(), fd=1_000_000, inode=1, size_bytes=4096)
    limit = ServerConfig().max_open_segments
    with unharmed(daemon), raw_client(daemon_process.endpoint) as client:
        client.hello(pid=os.getpid())
        epoch = client.ask(AcquireWriter(takeover=True), WriterAcquired).epoch
        refused = client.refused(OpenSource(epoch=epoch, kind="bucket", segments=[segment] * (limit + 1)))
        assert (refused.code, refused.details["limit"]) == (ErrorCode.LIMIT_EXCEEDED, limit)
