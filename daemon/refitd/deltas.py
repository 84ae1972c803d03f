"""The outputs that have news -> one message: deltas and the blobs that belong to them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from refit_protocol.codec import Frame
from refit_protocol.messages import TokenDelta
from refitd.output import TOKEN_BYTES, Output

BLOBS = 7
# What a client has missed for long comes in several messages: each is in memory whole, on both sides.
MESSAGE_BYTES = 16 << 20


def deltas_message(
    outputs: Iterator[Output], most_bytes: float = math.inf
) -> tuple[list[TokenDelta], tuple[Frame, ...]]:
    """Blobs as `TokensGenerated` lists them; trailing empty ones are left out. Moves each output's cursor.

    Takes outputs until it has reached `most_bytes`; those that are left belong in the next message.
    """
    deltas: list[TokenDelta] = []
    parts: list[list[bytes]] = [[] for _ in range(BLOBS)]
    size_bytes = 0
    while size_bytes < most_bytes and (output := next(outputs, None)) is not None:
        if not output.has_news:
            continue
        first = output.sent
        delta = output.delta()
        deltas.append(delta)
        size_bytes += _append(parts, output, first, delta)
    blobs = [b"".join(part) for part in parts]
    while len(blobs) > 2 and not blobs[-1]:
        blobs.pop()
    return deltas, tuple(blobs)


def _append(parts: list[list[bytes]], output: Output, first: int, delta: TokenDelta) -> int:
    """How large the message has grown by it."""
    parts[0].append(output.token_ids[first:].tobytes())
    parts[1].append(output.logprobs[first:].tobytes())
    size_bytes = TOKEN_BYTES * delta.count * (1 + output.top) + len(delta.text or "")
    if output.top:
        parts[2].append(output.top_ids[first * output.top :].tobytes())
        parts[3].append(output.top_logprobs[first * output.top :].tobytes())
    if delta.prompt_top is not None:
        parts[4].append(output.prompt_top_ids.tobytes())
        parts[5].append(output.prompt_top_logprobs.tobytes())
        size_bytes += TOKEN_BYTES * len(output.prompt_top_ids)
    if delta.routed_experts is not None:
        experts = [chunk.astype("int32").tobytes() for chunk in output.routed_experts]
        parts[6].extend(experts)
        size_bytes += sum(map(len, experts))
    return size_bytes
