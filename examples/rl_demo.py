"""Reinforcement learning against a running vLLM engine: from random weights to the days of the week.

A tiny Qwen3 is trained in this process; the engine that samples from it lives in another one, refitd. Every step puts
the trainer's weights into the engine, samples, and learns from the rewards. That the weights arrive is seen twice: the
reward rises, and the engine's log probabilities are the trainer's own.

    scripts/demo [--steps N] [--json FILE] [--picture FILE] [--seed N]

Start reading at `train`. What a trainer adds to use refitd is marked `# <- refitd` there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from refit_trainer import Daemon, RefitdError, Sample, Sampling, share_parameters
from weekdays import policy, task, verdict
from weekdays.child_daemon import DaemonFailed, running_daemon
from weekdays.display import RunTable, save_picture
from weekdays.verdict import StepRecord, WrongWeights

STEPS = 50
SAMPLES_PER_PROMPT = 64
SAMPLING = Sampling(
    n=SAMPLES_PER_PROMPT, max_tokens=task.ANSWER_LENGTH, temperature=policy.TEMPERATURE, ignore_eos=True
)

# float32 like the trainer, so that the log probabilities of both can be compared to the last digits.
ENGINE_SETTINGS = [
    "engine.dtype=float32",
    "engine.enforce_eager=true",
    "engine.max_model_len=32",
    f"engine.max_num_seqs={len(task.DAYS) * SAMPLES_PER_PROMPT}",
    "engine.cpu_kv_cache_gib=1",
]

PICTURE = Path(__file__).parents[1] / "out" / "rl_demo.png"
WIDTH_OF_A_LOG = 104

Show = Callable[[StepRecord, Sample], None]


def train(model: PreTrainedModel, endpoint: str, day_tokens: list[int], steps: int, show: Show) -> list[StepRecord]:
    """Group-relative policy gradient, exactly on policy: every step samples from the weights it is about to improve."""
    records = []
    prompts = [[token] for token in day_tokens]
    share_parameters(model)  # <- refitd: moves the parameters into memory that the engine can read, once
    optimizer = policy.make_optimizer(model)

    with Daemon.connect(endpoint, client="rl_demo") as daemon:  # <- refitd
        for step in range(1, steps + 1):
            report = daemon.refit(model)  # <- refitd: from here on the engine runs these weights

            started = time.perf_counter()
            samples = list(daemon.generate(prompts, SAMPLING))  # <- refitd: token ids, logprobs, versions
            seconds = time.perf_counter() - started
            verdict.check_versions(report.version, [sample.version for sample in samples])

            samples.sort(key=lambda sample: (sample.prompt, sample.output))
            batch = make_batch(samples, day_tokens)
            logprobs = policy.answer_logprobs(model, batch.prompts, batch.answers)
            policy.reinforce(optimizer, logprobs, policy.group_advantages(batch.rewards))

            record = StepRecord(
                step=step,
                reward=batch.rewards.mean().item(),
                logprob_abs_diff=(logprobs.detach() - batch.engine_logprobs).abs().mean().item(),
                refit_ms=report.milliseconds.total,
                tokens_per_second=batch.answers.numel() / seconds,
                version=report.version,
            )
            records.append(record)
            show(record, samples[0])
    return records


@dataclass(frozen=True)
class Batch:
    """All samples of a step, those of one prompt next to each other.

    `prompts` (samples, 1), `answers` and `engine_logprobs` (samples, answer length), `rewards` (prompts, samples each).
    """

    prompts: torch.Tensor
    answers: torch.Tensor
    engine_logprobs: torch.Tensor
    rewards: torch.Tensor


def make_batch(samples: Sequence[Sample], day_tokens: list[int]) -> Batch:
    """`samples` in the order of prompt and output, all of the full length."""
    rewards = [task.reward(sample.prompt, sample.token_ids.tolist(), day_tokens) for sample in samples]
    return Batch(
        prompts=torch.tensor([[day_tokens[sample.prompt]] for sample in samples]),
        answers=torch.from_numpy(np.stack([sample.token_ids for sample in samples])).long(),
        engine_logprobs=torch.from_numpy(np.stack([sample.logprobs for sample in samples])),
        rewards=torch.tensor(rewards).view(len(day_tokens), -1),
    )


def run(options: argparse.Namespace, console: Console) -> list[StepRecord]:
    """Makes the model, starts the daemon, trains; the daemon is gone when this returns or raises."""
    torch.set_num_threads(1)  # so small a model is no faster on two, and the engine wants the other one
    transformers_logging.disable_progress_bar()
    tokenizer = task.build_tokenizer()
    model = policy.random_qwen3(len(tokenizer), options.seed)
    with tempfile.TemporaryDirectory(prefix="refitd-demo-") as name:
        directory = Path(name)
        model.save_pretrained(directory / "model")
        tokenizer.save_pretrained(directory / "model")
        with running_daemon(directory / "model", directory, ENGINE_SETTINGS, console) as endpoint:
            return train_in_view(model, tokenizer, endpoint, options.steps, console)


def train_in_view(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, endpoint: str, steps: int, console: Console
) -> list[StepRecord]:
    """Trains under a live table. In a terminal it shows the latest steps; all of them are printed in the end."""
    table = RunTable(asked=task.DAYS[0])

    def show(record: StepRecord, sample: Sample) -> None:
        table.add(record, str(tokenizer.decode(sample.token_ids)))

    try:
        with Live(table, console=console, transient=True):
            return train(model, endpoint, task.token_of_each_day(tokenizer), steps, show)
    finally:
        table.finished = True
        console.print(table)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=STEPS, metavar="N", help=f"training steps ({STEPS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each step measured to FILE")
    parser.add_argument(
        "--picture", type=Path, default=PICTURE, metavar="FILE", help="save the curves as a PNG there (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random weights (0)")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def write_json(records: Sequence[StepRecord], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"steps": [asdict(record) for record in records]}, indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 only where the reward rose and the engine ran the trainer's weights at every step."""
    options = parse_arguments(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_OF_A_LOG)
    try:
        records = run(options, console)
    except (DaemonFailed, RefitdError, WrongWeights) as error:
        console.print("[bold red]failed:[/]", escape(str(error)))
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json is not None:
        write_json(records, options.json)
    save_picture(records, options.picture)
    console.print(f"curves: {options.picture.resolve()}", soft_wrap=True)
    return report_verdict(records, goal=verdict.GOAL_REWARD if options.steps >= STEPS else None, console=console)


def report_verdict(records: Sequence[StepRecord], goal: float | None, console: Console) -> int:
    found = verdict.failures(records, goal)
    for failure in found:
        console.print("[bold red]failed:[/]", failure)
    if not found:
        console.print("[bold green]The reward rose, and at every step the engine ran exactly the trainer's weights.[/]")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
