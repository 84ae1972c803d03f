"""Memory of a trainer on another GPU of the host, as the ranks of a sharded trainer lend it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cupy", reason="needs CuPy, of the extra cuda12 or cuda13")

from refitd.worker.cuda_memory import CudaIpcMapping, device_uuid
from tests.gpu.peers import peer
from tests.gpu.test_cuda_memory import described, exporter

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")


def test_a_worker_reads_the_memory_of_another_gpu() -> None:
    """What is seen through the mapping on one GPU is what the trainer holds on the other, also after it wrote again."""
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    with peer(exporter, 1 << 20, environment={"CUDA_VISIBLE_DEVICES": "1"}) as trainer:
        segments, places = described(trainer)
        assert {segment.device_uuid for segment in segments} == {device_uuid(there)}
        mappings = [CudaIpcMapping(segment, here) for segment in segments]
        for (segment, offset), value in zip(places, trainer.ask("values"), strict=True):
            seen = mappings[segment].data[offset : offset + value.nbytes]
            assert seen.device == here
            assert torch.equal(seen.clone().cpu(), value.view(torch.uint8))
        segment, offset = places[1]
        for round_ in range(20):
            trainer.ask(("write after", 5, round_ + 1))
            written = mappings[segment].written
            assert written is not None
            written.wait()
            assert mappings[segment].data[offset : offset + 4096].eq(round_ + 1).all()
        for mapping in mappings:
            mapping.close()
