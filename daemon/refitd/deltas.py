"""The outputs that have news -> one message: deltas and the blobs that belong to them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from refit_protocol.codec import Frame
from refit_protocol.messages import TokenDelta
from refitd.output import Output

BLOBS = 7


def deltas_message(outputs: Iterable[Output]) -> tuple[list[TokenDelta], tuple[Frame, ...]]:
    """Blobs as `TokensGenerated` lists them; trailing empty ones are left out. Moves each output's cursor."""
    deltas: list[TokenDelta] = []
    parts: list[list[bytes]] = [[] for _ in range(BLOBS)]
    for output in outputs:
        if not output.has_news:
            continue
        first = output.sent
        delta = output.delta()
        deltas.append(delta)
        _append(parts, output, first, delta)
    blobs = [b"".join(part) for part in parts]
    while len(blobs) > 2 and not blobs[-1]:
        blobs.pop()
    return deltas, tuple(blobs)


def _append(parts: list[list[bytes]], output: Output, first: int, delta: TokenDelta) -> None:
    parts[0].append(output.token_ids[first:].tobytes())
    parts[1].append(output.logprobs[first:].tobytes())
    if output.top:
        parts[2].append(output.top_ids[first * output.top :].tobytes())
        parts[3].append(output.top_logprobs[first * output.top :].tobytes())
    if delta.prompt_top is not None:
        parts[4].append(output.prompt_top_ids.tobytes())
        parts[5].append(output.prompt_top_logprobs.tobytes())
    if delta.routed_experts is not None:
        parts[6].extend(chunk.astype("int32").tobytes() for chunk in output.routed_experts)
