"""O2: a model whose every token reveals the weights that made it.

Attention and MLP add nothing, so the last hidden state is the last token's embedding, and `lm_head` maps it to that
token's successor: a permutation chosen per version.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

SHARPNESS = 3.0


def make_markov(model: PreTrainedModel, seed: int) -> npt.NDArray[np.int64]:
    """Turns the (shared) Qwen3 into the model of permutation `seed`, in place; returns the successor of each id."""
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    successors = np.random.default_rng(seed).permutation(vocabulary)
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
    return successors


def follows(successors: npt.NDArray[np.int64], previous: int, token: int) -> bool:
    """Whether weights with these successors make `token` after `previous`."""
    return int(successors[previous]) == token
