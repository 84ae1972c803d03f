"""Which daemon a prompt goes to: always the same for one prefix, unless that one has too much to do. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from refit_protocol.messages import Sampling
from refit_trainer.prompts import Prompt

# Four blocks of vLLM's KV cache: prompts that share them are worth being kept together.
PREFIX_TOKENS = 64
PREFIX_CHARACTERS = 256
_CHARACTERS_A_TOKEN = 4
# A member may have this much more than its share of all outstanding tokens, before a prefix moves elsewhere.
_BOUND = 1.25
# Below this many outstanding tokens nobody is busy, and stickiness comes first.
_SLACK_TOKENS = 4096


@dataclass
class Load:
    """What we have asked a member for and not received yet."""

    tokens: int = 0
    sequences: int = 0


class Router:
    """Rendezvous hashing with bounded loads: a member that comes or goes moves only its own prefixes."""

    def __init__(self, slack_tokens: int = _SLACK_TOKENS) -> None:
        self._slack_tokens = slack_tokens
        self._loads: defaultdict[str, Load] = defaultdict(Load)

    def load(self, member: str) -> Load:
        return self._loads[member]

    def place(self, key: bytes, tokens: int, members: Sequence[str], foreign: Mapping[str, int]) -> str:
        """The member for `tokens` more; `foreign` is what others have made the members do, in tokens.

        The first in the order of `key` whose load stays within the bound, else the least loaded one.
        """
        loads = {member: self._loads[member].tokens + foreign.get(member, 0) for member in members}
        bound = max(_BOUND * (sum(loads.values()) + tokens) / len(members), self._slack_tokens)
        for member in ranked(key, members):
            if loads[member] + tokens <= bound:
                return member
        return min(members, key=loads.__getitem__)

    def add(self, member: str, tokens: int, sequences: int) -> None:
        """Negative numbers take away what has arrived."""
        load = self._loads[member]
        load.tokens += tokens
        load.sequences += sequences


def ranked(key: bytes, members: Sequence[str]) -> list[str]:
    """The members in the order in which this key prefers them."""
    return sorted(members, key=lambda member: blake2b(key, key=_hash_key(member), digest_size=8).digest())


def prefix_key(prompt: Prompt, group: Hashable | None = None) -> bytes:
    """Equal for prompts that belong together: of one `group` where it is given, else with one beginning."""
    if group is not None:
        return repr(group).encode()
    if isinstance(prompt, str):
        return prompt[:PREFIX_CHARACTERS].encode()
    return np.asarray(prompt[:PREFIX_TOKENS]).astype("<i8").tobytes()


def sequence_tokens(prompt: Prompt, sampling: Sampling, context_tokens: int) -> int:
    """At most so many tokens does one output of the prompt cost, the prompt's share included."""
    length = len(prompt) // _CHARACTERS_A_TOKEN + 1 if isinstance(prompt, str) else len(prompt)
    longest = max(context_tokens - length, 1)
    new = longest if sampling.max_tokens is None else min(sampling.max_tokens, longest)
    return -(-length // max(sampling.n, 1)) + new


def _hash_key(member: str) -> bytes:
    return blake2b(member.encode(), digest_size=32).digest()
