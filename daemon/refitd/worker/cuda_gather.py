"""Gathers by address in one launch, however many tensors the elements lie in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from refitd.worker.cuda_kernels import THREADS, launch
from refitd.worker.gather import Elements


class DeviceGather:
    """Holds addresses, and the tensors so that the addresses stay true."""

    def __init__(self, elements: Sequence[Elements]) -> None:
        self._tensors = [flat for flat, _ in elements]
        device = self._tensors[0].device
        addresses = [flat.data_ptr() + indices * flat.element_size() for flat, indices in elements]
        widths = [np.full(len(indices), flat.element_size(), dtype=np.uint8) for flat, indices in elements]
        self._addresses = torch.from_numpy(np.concatenate(addresses)).to(device)
        self._widths = torch.from_numpy(np.concatenate(widths)).to(device)

    def bits(self) -> torch.Tensor:
        count = len(self._addresses)
        found = torch.empty(count, dtype=torch.int64, device=self._addresses.device)
        with torch.cuda.device(found.device):
            launch("gather_bits", -(-count // THREADS), THREADS, self._addresses, self._widths, found, count)
        return found
