"""Has vLLM's loader say how far it is: `load_progress` in the worker, applied before the model loads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from refitd.load_progress import PROGRESS_VARIABLE, ProgressFile

_prepare_weights = DefaultModelLoader._prepare_weights
_get_weights_iterator = DefaultModelLoader._get_weights_iterator


def watch_loader() -> None:
    """May be called again. Nothing is told outside a daemon; other loaders than vLLM's default one stay silent."""
    DefaultModelLoader._prepare_weights = _prepare_and_measure
    DefaultModelLoader._get_weights_iterator = _iterate_and_tell


def _prepare_and_measure(self: Any, *args: Any, **kwargs: Any) -> Any:
    prepared = _prepare_weights(self, *args, **kwargs)
    self.refitd_checkpoint_bytes = sum(os.path.getsize(file) for file in prepared[1])
    return prepared


def _iterate_and_tell(self: Any, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    directory = os.environ.get(PROGRESS_VARIABLE)
    if directory is None:
        yield from _get_weights_iterator(self, source)
        return
    progress: ProgressFile | None = None
    for name, tensor in _get_weights_iterator(self, source):
        # The files are known once the first tensor has come.
        progress = progress or ProgressFile(Path(directory), self.refitd_checkpoint_bytes)
        yield name, tensor
        progress.add(tensor.nbytes)
    if progress is not None:
        progress.done()
