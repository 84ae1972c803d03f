"""Padded batches in, padded batches of one sample out. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from refit_trainer.stream import IntArray, Sample

Batch: TypeAlias = dict[str, Any]
StopStrings: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """Prompts that are sampled alike: their numbers in the batch, and their token ids or texts."""

    indices: list[int]
    prompts: list[Any]
    stop: StopStrings


def split(data: Mapping[str, Any], common: Sequence[str], pad_token_id: int | None) -> list[Work]:
    """The prompts of `input_ids` (prompts, width), as many tokens of each as `input_lengths` (prompts,) says.

    With `pad_token_id`, what lies behind must be padding. Raises ValueError for what is no such batch.
    """
    input_ids, lengths = data["input_ids"], data["input_lengths"]
    if input_ids.ndim != 2 or tuple(lengths.shape) != (len(input_ids),):
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)} and input_lengths {tuple(lengths.shape)}, "
            "wanted are (prompts, width) and (prompts,)"
        )
    rows = [
        _unpadded(index, row, int(length), pad_token_id)
        for index, (row, length) in enumerate(zip(input_ids, lengths, strict=True))
    ]
    return _grouped(rows, _stops(data, common, len(rows)))


def text_work(data: Mapping[str, Any], common: Sequence[str]) -> list[Work]:
    """The texts of `prompts`."""
    prompts = list(data["prompts"])
    return _grouped(prompts, _stops(data, common, len(prompts)))


def finished(sample: Sample, prompt: Sequence[int], width: int, pad_token_id: int) -> Batch:
    """What the reference yields for one sample. Tensors are at least as wide as the batch that the prompt came from.

    `output_ids` (1, width) int64: prompt, generation, padding; `logprobs` (1, width) float32: 0 where nothing was
    generated; `generation_lengths`, `unpadded_sequence_lengths` (1,) int64; `truncated` (1,) bool: the output met the
    limit on tokens or the end of the context; `routed_experts` (1, width, layers, experts) int32, -1 where there is
    none.
    """
    start, count = len(prompt), len(sample.token_ids)
    width = max(width, start + count)
    output_ids = torch.full((1, width), pad_token_id, dtype=torch.int64)
    output_ids[0, :start] = torch.tensor(prompt, dtype=torch.int64)
    output_ids[0, start : start + count] = torch.tensor(sample.token_ids.tolist(), dtype=torch.int64)
    logprobs = torch.zeros((1, width), dtype=torch.float32)
    logprobs[0, start : start + count] = torch.tensor(sample.logprobs.tolist(), dtype=torch.float32)
    batch = _batch(output_ids, logprobs, start, count, truncated=sample.finish_reason == "length")
    if sample.routed_experts is not None:
        batch["routed_experts"] = _experts(sample.routed_experts, width)
    return batch


def exhausted(prompt: Sequence[int], width: int, pad_token_id: int) -> Batch:
    """For a prompt that fills the context: nothing can be generated, which is said by `truncated`."""
    width = max(width, len(prompt))
    output_ids = torch.full((1, width), pad_token_id, dtype=torch.int64)
    output_ids[0, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
    return _batch(output_ids, torch.zeros((1, width), dtype=torch.float32), len(prompt), 0, truncated=True)


def _batch(output_ids: torch.Tensor, logprobs: torch.Tensor, prompt: int, count: int, *, truncated: bool) -> Batch:
    return {
        "output_ids": output_ids,
        "logprobs": logprobs,
        "generation_lengths": torch.tensor([count]),
        "unpadded_sequence_lengths": torch.tensor([prompt + count]),
        "truncated": torch.tensor([truncated]),
    }


def _experts(routed: IntArray, width: int) -> torch.Tensor:
    experts = torch.full((1, width, *routed.shape[1:]), -1, dtype=torch.int32)
    experts[0, : len(routed)] = torch.tensor(routed.tolist(), dtype=torch.int32)
    return experts


def _unpadded(index: int, row: torch.Tensor, length: int, pad_token_id: int | None) -> list[int]:
    if not 0 < length <= len(row):
        raise ValueError(f"prompt {index} has length {length}, wanted is 1 to {len(row)}")
    if pad_token_id is not None and not bool((row[length:] == pad_token_id).all()):
        raise ValueError(f"prompt {index} is not padded on the right with {pad_token_id} after its {length} tokens")
    prompt: list[int] = row[:length].tolist()
    return prompt


def _stops(data: Mapping[str, Any], common: Sequence[str], count: int) -> list[StopStrings]:
    own = data.get("stop_strings") or [None] * count
    if len(own) != count:
        raise ValueError(f"stop_strings has {len(own)} entries for {count} prompts")
    return [tuple(sorted({*common, *(stops or [])})) for stops in own]


def _grouped(prompts: Iterable[Any], stops: Iterable[StopStrings]) -> list[Work]:
    """Prompts with the same stop strings go into one request."""
    groups: dict[StopStrings, Work] = {}
    for index, (prompt, stop) in enumerate(zip(prompts, stops, strict=True)):
        work = groups.setdefault(stop, Work([], [], stop))
        work.indices.append(index)
        work.prompts.append(prompt)
    return list(groups.values())
