"""How long a refit takes on machines that are not here: bytes over links, as formulas and the tables of a document.

`python -m scripts.benches.scaling_model` writes them into docs/scaling.md. Rates are bytes a second, one direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"

GIGA = 1e9
# --- measured on one H200: docs/benchmarks.md, "One GPU" --------------------------------------------------------------
MEASURED_BYTES = 16_381_470_720
# One plain copy, each byte read and written: 7.64 ms.
COPY_RATE = MEASURED_BYTES / 7.64e-3
# The replayed plan, from before the launch until every byte has arrived: 8.23 ms.
REPLAY_RATE = MEASURED_BYTES / 8.23e-3
# What an idle refit of that run took beside the replay: 11.82 ms - 8.23 ms. It does not grow with the model.
CALL_SECONDS = 11.82e-3 - 8.23e-3
# Unary calls that one client got answered on two CPU cores, docs/benchmarks.md, "The wire".
CALLS_PER_SECOND = 17_719
# --- measured nowhere here: product sheets, and the part of them that is thought to be reached ------------------------
NVLINK_RATE = 450 * GIGA * 0.8
PCIE_RATE = 64 * GIGA * 0.8
INFINIBAND_RATE = 50 * GIGA * 0.85
ETHERNET_RATE = 12.5 * GIGA * 0.85
INFINIBAND_LATENCY_SECONDS = 10e-6
PIECE_BYTES = 128 << 20
GPUS_PER_NODE = 8
# GetStatus, ValidateRefit and CommitRefit.
CALLS_PER_REFIT = 3


@dataclass(frozen=True)
class Model:
    """`bytes_per_parameter`: scales included; `gpus_per_engine`: ranks, whatever is split among them."""

    name: str
    parameters: float
    bytes_per_parameter: float
    gpus_per_engine: int

    @property
    def size_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter

    @property
    def gpu_bytes(self) -> float:
        """Every rank holds its own part, and copies no other."""
        return self.size_bytes / self.gpus_per_engine


# fp8 in blocks of 128 x 128 with a float32 scale each.
FP8_BYTES = 1 + 4 / 128**2
EIGHT_B = Model("8B bf16", MEASURED_BYTES / 2, 2, 1)
SEVENTY_B = Model("70B bf16", 70.6e9, 2, 4)
SEVENTY_B_FP8 = Model("70B fp8", 70.6e9, FP8_BYTES, 2)
TRILLION = Model("1T MoE bf16", 1.04e12, 2, 32)
TRILLION_FP8 = Model("1T MoE fp8", 1.04e12, FP8_BYTES, 16)
MODELS = (EIGHT_B, SEVENTY_B, SEVENTY_B_FP8, TRILLION, TRILLION_FP8)
FLEETS = (8, 64, 256, 1024)


# --- one engine -------------------------------------------------------------------------------------------------------


def in_place_seconds(model: Model) -> float:
    """Trainer and engine on the same GPUs, each rank's bytes on its own one: all ranks copy at the same time."""
    return CALL_SECONDS + model.gpu_bytes / REPLAY_RATE


def bucket_seconds(model: Model) -> float:
    """Packed once and copied once; packing the next bucket overlaps, but both use the same memory."""
    return CALL_SECONDS + model.gpu_bytes / COPY_RATE + model.gpu_bytes / REPLAY_RATE


def gathered_seconds(model: Model) -> float:
    """The trainer is sharded over the node's GPUs otherwise than the engine: all but an eighth comes over NVLink."""
    foreign_bytes = model.gpu_bytes * (1 - 1 / GPUS_PER_NODE)
    return bucket_seconds(model) + foreign_bytes / NVLINK_RATE


def host_seconds(model: Model) -> float:
    """From the host's memory, such as weights kept there: one PCIe link a GPU."""
    return CALL_SECONDS + model.gpu_bytes / PCIE_RATE


# --- many engines on other nodes --------------------------------------------------------------------------------------


def ring_seconds(size_bytes: float, receivers: int, rate: float, piece_bytes: float = PIECE_BYTES) -> float:
    """A pipelined chain: every receiver hands each piece on while it takes the next."""
    pieces = max(ceil(size_bytes / piece_bytes), 1)
    step = size_bytes / pieces / rate + INFINIBAND_LATENCY_SECONDS
    return (pieces + receivers - 1) * step


def tree_seconds(size_bytes: float, receivers: int, rate: float, piece_bytes: float = PIECE_BYTES) -> float:
    """Two binary trees, each for half the bytes, so that all send and receive at full rate: NCCL's kind."""
    pieces = max(ceil(size_bytes / piece_bytes), 1)
    step = size_bytes / pieces / rate + INFINIBAND_LATENCY_SECONDS
    return (pieces + 2 * ceil(log2(receivers + 1)) - 1) * step


def broadcast_seconds(model: Model, gpus: int, rate: float, *, sharded: bool) -> float:
    """To every engine of the fleet, over one link a GPU; the last piece is still to be copied into place.

    `sharded`: a group for each rank of an engine brings it its own bytes. Otherwise every GPU receives all of them.
    """
    engines = max(gpus // model.gpus_per_engine, 1)
    size_bytes, receivers = (model.gpu_bytes, engines) if sharded else (model.size_bytes, gpus)
    return CALL_SECONDS + tree_seconds(size_bytes, receivers, rate) + PIECE_BYTES / REPLAY_RATE


def control_seconds(model: Model, gpus: int) -> float:
    """One client that talks to every engine's daemon by itself."""
    return CALLS_PER_REFIT * max(gpus // model.gpus_per_engine, 1) / CALLS_PER_SECOND


# --- the tables -------------------------------------------------------------------------------------------------------


def engines_table() -> str:
    rows = [
        (
            model.name,
            f"{model.size_bytes / GIGA:,.1f}",
            str(model.gpus_per_engine),
            f"{model.gpu_bytes / GIGA:.1f}",
            _ms(in_place_seconds(model)),
            _ms(bucket_seconds(model)),
            _ms(gathered_seconds(model)),
            _ms(host_seconds(model)),
        )
        for model in MODELS
    ]
    head = (
        "model",
        "GB",
        "GPUs an engine",
        "GB a GPU",
        "in place, ms",
        "buckets, ms",
        "gathered over NVLink, ms",
        "from host memory, ms",
    )
    return _table(head, rows)


def fleets_table() -> str:
    rows = [
        (
            model.name,
            f"{gpus:,}",
            f"{gpus // model.gpus_per_engine:,}",
            _ms(in_place_seconds(model)),
            _ms(broadcast_seconds(model, gpus, INFINIBAND_RATE, sharded=True)),
            _ms(broadcast_seconds(model, gpus, INFINIBAND_RATE, sharded=False)),
            _ms(broadcast_seconds(model, gpus, ETHERNET_RATE, sharded=True)),
            _ms(control_seconds(model, gpus)),
        )
        for model in MODELS
        for gpus in FLEETS
        if gpus >= model.gpus_per_engine
    ]
    head = (
        "model",
        "GPUs",
        "engines",
        "in place, ms",
        "own bytes, InfiniBand, ms",
        "all bytes, InfiniBand, ms",
        "own bytes, Ethernet, ms",
        "one client's messages, ms",
    )
    return _table(head, rows)


def checks_table() -> str:
    """The model against what docs/benchmarks.md has of the same thing, where it was not made from it."""
    sheet = 2 * MEASURED_BYTES / (4.8e12)
    read = MEASURED_BYTES / 4.8e12
    rows = [
        ("one plain copy on the device, from the sheet's 4.8 TB/s", sheet, 7.64e-3),
        ("reading all bytes once, from the sheet's 4.8 TB/s", read, 3.72e-3),
        ("attest and digest in full: the bytes read three times more than sampled", 3 * 3.72e-3, 11.8e-3),
        ("in place, attest off: the call and the replay", in_place_seconds(EIGHT_B), 11.42e-3),
        ("through buckets", bucket_seconds(EIGHT_B), 27.07e-3),
        ("a plain NCCL broadcast from one GPU to another, over NVLink", MEASURED_BYTES / NVLINK_RATE, 45.1e-3),
        ("a refit by NCCL over NVLink: the call and that", CALL_SECONDS + MEASURED_BYTES / NVLINK_RATE, 67.9e-3),
    ]
    head = ("what", "model, ms", "measured, ms", "error")
    return _table(head, [(what, _ms(model), _ms(seen), f"{model / seen - 1:+.0%}") for what, model, seen in rows])


TABLES = {"engines": engines_table, "fleets": fleets_table, "checks": checks_table}


def with_tables(document: str) -> str:
    """The document with every table between its markers as the model gives it."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
        before, _, rest = document.partition(begin)
        _, _, after = rest.partition(end)
        document = before + begin + table() + end + after
    return document


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
