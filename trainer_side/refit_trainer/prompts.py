"""What a caller may give as prompts, made into a `Generate` and its blob."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, cast

import numpy as np
import numpy.typing as npt

from refit_protocol.messages import Generate, Sampling
from refit_trainer.options import check_options, checked

# One prompt: token ids as a list, an array or a one-dimensional tensor; or text.
Prompt: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]] | str | Any"

_INT32 = np.iinfo(np.int32)
_SAMPLING = frozenset(Sampling.__struct_fields__)


# What happens at an output that was cut off: `OutputIncomplete`, or it comes like any other.
Incomplete: TypeAlias = Literal["raise", "yield"]


class RequestOptions(TypedDict, total=False):
    """What the daemon is told beside the prompts and the sampling."""

    priority: int
    lora: str | None
    routed_experts: bool
    min_version: int | None
    max_version_lag: int | None
    deadline_seconds: float | None


class GenerateOptions(RequestOptions, total=False):
    """See `AsyncDaemon.generate`."""

    incomplete: Incomplete


@dataclass(frozen=True)
class Reading:
    """How a consumer reads its replies; `deadline_seconds` is the request's, None where only the daemon has one."""

    deadline_seconds: float | None
    incomplete: Incomplete = "raise"


def reading_of(options: GenerateOptions) -> Reading:
    """Raises as `check_options` does."""
    refuse_misplaced(options)
    check_options("generate", options, GenerateOptions)
    return Reading(options.get("deadline_seconds"), options.get("incomplete", "raise"))


def refuse_misplaced(options: Mapping[str, Any]) -> None:
    """Raises TypeError for what is said beside the sampling instead of in it."""
    if misplaced := sorted(options.keys() & _SAMPLING):
        named = misplaced[0]
        raise TypeError(f"generate() has no option {named!r}: it belongs into the sampling, Sampling({named}=...)")


def generate_command(
    prompts: Iterable[Prompt], sampling: Sampling | None, options: GenerateOptions
) -> tuple[Generate, list[bytes]]:
    """The request and its blobs; raises TypeError or ValueError for what is no prompt, or no sampling."""
    if not isinstance(sampling, Sampling | None):
        raise TypeError(f"sampling is a {type(sampling).__name__}: it has to be Sampling(...) or None")
    texts, prompt_lengths, blobs = _split(prompts)
    asked = cast(RequestOptions, {name: value for name, value in options.items() if name != "incomplete"})
    command = Generate(prompt_lengths=prompt_lengths, texts=texts, sampling=checked(sampling or Sampling()), **asked)
    return command, blobs


def _split(prompts: Iterable[Prompt]) -> tuple[list[str] | None, list[int], list[bytes]]:
    """(texts, prompt_lengths, blobs) as `Generate` has them."""
    if isinstance(prompts, str):
        raise TypeError("prompts is one text: pass a list of prompts, or use generate_one()")
    listed = list(prompts)
    texts = [prompt for prompt in listed if isinstance(prompt, str)]
    if texts and len(texts) == len(listed):
        return texts, [], []
    arrays = [_token_ids(prompt, index) for index, prompt in enumerate(listed)]
    blob = np.concatenate(arrays).tobytes() if arrays else b""
    return None, [len(array) for array in arrays], [blob]


def _token_ids(prompt: Prompt, index: int) -> npt.NDArray[np.int32]:
    if isinstance(prompt, str):
        raise TypeError(f"prompt {index} is text among token ids: pass either texts or token ids")
    array = np.asarray(prompt)
    if array.ndim != 1:
        raise TypeError(f"prompt {index} has {array.ndim} dimensions, not 1: pass a list of lists of token ids")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"prompt {index} holds {array.dtype} values, not integer token ids")
    if array.min() < _INT32.min or array.max() > _INT32.max:
        raise ValueError(f"prompt {index} holds token ids outside 32 bits")
    return array.astype("<i4")
