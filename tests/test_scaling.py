"""docs/scaling.md says what the model says, and the model behaves as bytes over links do."""

from __future__ import annotations

import pytest
from scripts.benches import scaling_model as model
from scripts.benches.scaling_model import EIGHT_B, INFINIBAND_RATE, MODELS, TABLES, TRILLION

DOCUMENT = model.DOCUMENT.read_text()


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_what_the_model_gives(name: str) -> None:
    """Run `python -m scripts.benches.scaling_model` after a change."""
    assert f"<!-- table: {name} -->\n{TABLES[name]()}<!-- end: {name} -->" in DOCUMENT


def test_writing_the_tables_again_changes_nothing() -> None:
    assert model.with_tables(DOCUMENT) == DOCUMENT


@pytest.mark.parametrize(
    "rate",
    [
        f"| *copy* | {model.COPY_RATE / 1e9:,.0f} GB/s |",
        f"| *replay* | {model.REPLAY_RATE / 1e9:,.0f} GB/s |",
        f"| *call* | {model.CALL_SECONDS * 1e3:.1f} ms |",
        f"| one client's unary calls | {model.CALLS_PER_SECOND:,} a second |",
        f"| *NVLink* | {model.NVLINK_RATE / 1e9:.0f} GB/s |",
        f"| *PCIe* | {model.PCIE_RATE / 1e9:.0f} GB/s |",
        f"| *InfiniBand* | {model.INFINIBAND_RATE / 1e9:.0f} GB/s |",
        f"| *Ethernet* | {model.ETHERNET_RATE / 1e9:.0f} GB/s |",
    ],
)
def test_rates_are_those_of_the_model(rate: str) -> None:
    assert rate in DOCUMENT


def test_in_place_gives_back_the_run_it_was_made_from() -> None:
    assert model.in_place_seconds(EIGHT_B) == pytest.approx(11.82e-3)


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.name)
def test_every_engine_fits_its_gpus(kind: model.Model) -> None:
    """With at least half of the 141 GB left."""
    assert kind.gpu_bytes < 141e9 / 2


def test_a_broadcast_is_never_faster_than_its_link() -> None:
    """One receiver takes the bytes over the link; more only add steps, far fewer in a tree than in a chain."""
    bytes_over_link = EIGHT_B.size_bytes / INFINIBAND_RATE
    for broadcast in (model.ring_seconds, model.tree_seconds):
        times = [broadcast(EIGHT_B.size_bytes, receivers, INFINIBAND_RATE) for receivers in (1, 2, 64, 1024)]
        assert times == sorted(times)
        assert times[0] >= bytes_over_link
    ring = model.ring_seconds(EIGHT_B.size_bytes, 1024, INFINIBAND_RATE)
    assert ring > 7 * model.tree_seconds(EIGHT_B.size_bytes, 1024, INFINIBAND_RATE)


def test_own_bytes_cost_a_ranks_share() -> None:
    """Of a model over 32 GPUs, about a 32nd of what all bytes to all GPUs cost."""
    own = model.broadcast_seconds(TRILLION, 1024, INFINIBAND_RATE, sharded=True)
    everything = model.broadcast_seconds(TRILLION, 1024, INFINIBAND_RATE, sharded=False)
    assert 25 < everything / own < 33
