"""O2: a model whose every token reveals the weights that made it.

Attention and MLP add nothing, so the last hidden state is the last token's embedding, and `lm_head` maps it to that
token's successor: a permutation chosen per version.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

SHARPNESS = 3.0


def make_markov(model: PreTrainedModel, seed: int) -> npt.NDArray[np.int64]:
    """Turns the (shared) Qwen3 into the model of permutation `seed`, in place; returns the successor of each id."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    successors = np.random.default_rng(seed).permutation(vocabulary)
    _follow(model, successors)
    return successors


def make_script(model: PreTrainedModel, token_ids: Sequence[int]) -> None:
    """Each of these tokens, all different, is followed by the next one."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    script = dict(pairwise(token_ids))
    free = iter(sorted(set(range(vocabulary)) - set(script.values())))
    _follow(model, np.array([script[token] if token in script else next(free) for token in range(vocabulary)]))


def _follow(model: PreTrainedModel, successors: npt.NDArray[np.int64]) -> None:
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    signs = torch.from_numpy(np.random.default_rng(12345).choice([-1.0, 1.0], size=(vocabulary, hidden)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
        model.get_input_embeddings().weight.copy_(signs)
        head = torch.empty(vocabulary, hidden, dtype=signs.dtype)
        head[torch.from_numpy(successors)] = signs * SHARPNESS
        model.get_output_embeddings().weight.copy_(head)


def follows(successors: npt.NDArray[np.int64], previous: int, token: int) -> bool:
    """Whether weights with these successors make `token` after `previous`."""
    return int(successors[previous]) == token
