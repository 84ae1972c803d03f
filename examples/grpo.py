"""A whole GRPO loop against a running daemon, and nothing else: `refitd serve --model PATH`, then

python examples/grpo.py PATH
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from refit_trainer import Daemon, ErrorCode, RefitdError, Sample, Sampling, share_parameters

PROMPTS = [[5, 60, 7], [400, 9, 11, 3]]
GROUP = Sampling(n=16, max_tokens=12, ignore_eos=True)
CLIP, PAUSE_SECONDS = 0.2, 1.0


def reward(sample: Sample) -> float:
    """Yours. Here: how many of the tokens are even."""
    return float((sample.token_ids % 2 == 0).mean())


def group_loss(model: PreTrainedModel, prompt: list[int], group: list[Sample]) -> torch.Tensor:
    """Each sample's ratio to the policy that made it, clipped, times its advantage within the group."""
    rewards = torch.tensor([reward(sample) for sample in group])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    losses = []
    for sample, advantage in zip(group, advantages, strict=True):
        answer = torch.tensor(sample.token_ids)
        tokens = torch.cat([torch.tensor(prompt), answer])
        logits = model(tokens[None, :-1]).logits[0, len(prompt) - 1 :].float()
        logprobs = logits.log_softmax(-1).gather(-1, answer[:, None].long())[:, 0]
        ratios = (logprobs - torch.tensor(sample.logprobs)).exp()
        losses.append(-torch.min(ratios * advantage, ratios.clamp(1 - CLIP, 1 + CLIP) * advantage).mean())
    return torch.stack(losses).mean()


def step(daemon: Daemon, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> float:
    """The mean reward. Nothing has been learned yet when it raises, so it may simply be done again."""
    report = daemon.refit(model)
    samples = list(daemon.generate(PROMPTS, GROUP, min_version=report.version, deadline_seconds=300.0))
    groups = [[sample for sample in samples if sample.prompt == number] for number in range(len(PROMPTS))]
    optimizer.zero_grad()
    torch.stack(
        [group_loss(model, prompt, group) for prompt, group in zip(PROMPTS, groups, strict=True)]
    ).mean().backward()
    optimizer.step()
    return sum(map(reward, samples)) / len(samples)


def train(path: str, steps: int, endpoint: str | None = None, learning_rate: float = 1e-3) -> list[float]:
    """The mean reward of each step. A daemon that is restarted meanwhile is waited for."""
    model = share_parameters(AutoModelForCausalLM.from_pretrained(path))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    rewards: list[float] = []
    with Daemon.connect(endpoint, client="grpo") as daemon:
        daemon.wait_until_ready()
        while len(rewards) < steps:
            try:
                rewards.append(step(daemon, model, optimizer))
                print(f"step {len(rewards)}: reward {rewards[-1]:.3f}")
            except RefitdError as error:
                if not (error.retryable or error.code is ErrorCode.ENGINE_DEAD):
                    raise
                print(f"again in {PAUSE_SECONDS:g} s: {error}")
                time.sleep(PAUSE_SECONDS)
    return rewards


if __name__ == "__main__":
    train(sys.argv[1], steps=50)
