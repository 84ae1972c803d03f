"""The trainer's model and how it learns: group-relative policy gradient, exactly on policy."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

LEARNING_RATE = 3e-3
TEMPERATURE = 1.0
# Added to a group's spread, so that rewards which hardly differ move the model little.
SMALL_SPREAD = 0.05


def random_qwen3(vocab_size: int, seed: int) -> PreTrainedModel:
    """A Qwen3 of 0.4 million parameters in float32 that knows nothing yet."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)


def answer_logprobs(model: PreTrainedModel, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The log probability of every answer token, as the engine computes it: of the distribution that was sampled from.

    `prompts` is (batch, prompt tokens), `answers` (batch, answer tokens); the result has the shape of `answers`.
    """
    tokens = torch.cat([prompts, answers], dim=1)
    logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=answers.shape[1]).logits
    return torch.log_softmax(logits / TEMPERATURE, dim=-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each answer is than the others to its prompt, in about their spread: (prompts, samples)."""
    spread = rewards.std(dim=1, keepdim=True, correction=0)
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (spread + SMALL_SPREAD)


def reinforce(optimizer: torch.optim.Optimizer, logprobs: torch.Tensor, advantages: torch.Tensor) -> None:
    """One optimiser step, in place, that makes the answers likelier that were better than their group.

    `logprobs` is (prompts x samples, tokens), `advantages` (prompts, samples).
    """
    loss = -(logprobs * advantages.view(-1, 1)).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_((p for group in optimizer.param_groups for p in group["params"]), max_norm=1.0)
    optimizer.step()
