"""The fuzzer's target: any header either becomes a message whose descriptors are checked, or a `ProtocolError`.

Arguments are libFuzzer's own: `-runs=N`, `-max_total_time=SECONDS`, a corpus directory. It starts from the vectors.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["refit_protocol"]):
    from refit_protocol.codec import (
        MAGIC,
        CodecLimits,
        decode_reply,
        decode_request,
        encode_request,
        salvage_request_id,
    )
    from refit_protocol.errors import ProtocolError
    from refit_protocol.messages import ApplyBucket, BeginRefit, OpenSource, Request
    from refit_protocol.tensors import TensorShape, check_pieces, check_segments, check_shape, check_source_tensors

VECTORS = Path(__file__).resolve().parent.parent / "protocol" / "vectors"
LIMITS = CodecLimits(header_bytes=1 << 16, items=1 << 12, array_items=1 << 10)
ANNOUNCED_SIZE = 4
LARGEST_SEED_BYTES = 4096


def one_input(content: bytes) -> None:
    """Raises, and so is reported by the fuzzer, for anything but a `ProtocolError`."""
    frames = [MAGIC, content]
    assert 0 <= salvage_request_id(frames, LIMITS) < 1 << 64
    with contextlib.suppress(ProtocolError):
        decode_reply(frames, LIMITS)
    with contextlib.suppress(ProtocolError):
        header, _ = decode_request(frames, LIMITS)
        # What was understood can be said again, and means the same.
        assert decode_request(encode_request(header))[0] == header
        check_descriptors(header.body)


def check_descriptors(body: Request) -> None:
    """What the daemon does with them before it maps anything."""
    if isinstance(body, OpenSource):
        check_segments(body.segments)
        check_source_tensors(body.tensors, body.segments)
    elif isinstance(body, BeginRefit):
        for tensor in body.tensors:
            check_shape(tensor)
    elif isinstance(body, ApplyBucket):
        announced = {piece.name: announced_tensor(piece.name) for piece in body.pieces}
        check_pieces(body.pieces, announced, 1 << 10)


def announced_tensor(name: str) -> TensorShape:
    from refit_protocol.tensors import DType

    return TensorShape(name=name, dtype=DType.FLOAT32, shape=(ANNOUNCED_SIZE, ANNOUNCED_SIZE))


def write_seeds(directory: Path) -> None:
    """The headers of all vectors, valid and invalid, that are small enough to be mutated."""
    for file in sorted(VECTORS.glob("*.json")):
        for number, vector in enumerate(json.loads(file.read_text())):
            content = header_of(vector)
            if 0 < len(content) <= LARGEST_SEED_BYTES:
                (directory / f"{file.stem}-{number}").write_bytes(content)


def header_of(vector: dict[str, list[str | list[tuple[str, int]]]]) -> bytes:
    if len(vector["frames"]) < 2:
        return b""
    frame = vector["frames"][1]
    parts = [(frame, 1)] if isinstance(frame, str) else frame
    if sum(len(part) // 2 * times for part, times in parts) > LARGEST_SEED_BYTES:
        return b""
    return b"".join(bytes.fromhex(part) * times for part, times in parts)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="refitd-fuzz-") as seeds:
        write_seeds(Path(seeds))
        atheris.Setup([*sys.argv, seeds], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
