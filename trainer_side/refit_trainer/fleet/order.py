"""What a caller asked a fleet for, and how it is cut into what single daemons are asked for. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from refit_protocol.messages import Generate, Sampling
from refit_trainer.fleet.routing import prefix_key, sequence_tokens
from refit_trainer.prompts import GenerateOptions, Prompt, Reading, generate_command, reading_of

# The number of a prompt, and of its continuation.
Output = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """Outputs `[first_output, first_output + outputs)` of each of these prompts; `moves`: how often they were lost."""

    prompts: tuple[int, ...]
    first_output: int
    outputs: int
    moves: int = 0

    @property
    def keys(self) -> list[Output]:
        return [(prompt, self.first_output + index) for prompt in self.prompts for index in range(self.outputs)]

    def key_of(self, prompt: int, output: int) -> Output:
        """Of the daemon's numbers, ours."""
        return self.prompts[prompt], self.first_output + output

    def without(self, done: Collection[Output]) -> Iterator[Part]:
        """What is left to be made elsewhere; whole prompts stay together, single outputs are asked for one by one."""
        missing = [key for key in self.keys if key not in done]
        begun = {prompt for prompt, output in self.keys if (prompt, output) in done}
        if whole := tuple(prompt for prompt in self.prompts if prompt not in begun):
            yield Part(whole, self.first_output, self.outputs, self.moves + 1)
        for prompt, output in missing:
            if prompt in begun:
                yield Part((prompt,), output, 1, self.moves + 1)


@dataclass(frozen=True)
class Order:
    """`whole`: outputs are delivered when they are finished, so an unfinished one can be made again elsewhere.
    `mixed`: any daemon may serve it, with whatever version it has.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    options: GenerateOptions
    groups: Sequence[Hashable] | None
    whole: bool
    mixed: bool

    @property
    def everything(self) -> Part:
        return Part(tuple(range(len(self.prompts))), 0, self.sampling.n)

    @property
    def reading(self) -> Reading:
        return reading_of(self.options)

    def routing_key(self, prompt: int) -> bytes:
        return prefix_key(self.prompts[prompt], None if self.groups is None else self.groups[prompt])

    def tokens(self, prompt: int, context_tokens: int) -> int:
        """What one output of it costs at most."""
        return sequence_tokens(self.prompts[prompt], self.sampling, context_tokens)

    def command(self, part: Part, version: int | None, deadline_seconds: float | None) -> tuple[Generate, list[bytes]]:
        """For a daemon that serves `version`; None where any will do. Output i of a seeded prompt uses seed + i."""
        seed = self.sampling.seed
        sampling = msgspec.structs.replace(
            self.sampling, n=part.outputs, seed=None if seed is None else seed + part.first_output
        )
        options: GenerateOptions = {**self.options, "deadline_seconds": deadline_seconds}
        if version is not None:
            options = {**options, "min_version": version, "max_version_lag": None}
        return generate_command([self.prompts[prompt] for prompt in part.prompts], sampling, options)
