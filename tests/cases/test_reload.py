"""Case A, reload: the values on disk are what is served afterwards, or nothing has changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from typer.testing import CliRunner

from refit_protocol.errors import ErrorCode
from refit_protocol.states import EngineState
from refit_trainer import Daemon, RefitdError, Sampling
from refitd.cli import app
from tests.canary import unharmed
from tests.conftest import GREEDY, PROMPT, load_seed
from tests.daemon_process import DaemonProcess
from tests.worker.models import build_model, random_model

WEIGHTS = "model.safetensors"
LONG_PROMPT = [index * 7 % 500 for index in range(150)]


@pytest.fixture(scope="module", autouse=True)
def weights_a_afterwards(daemon_process: DaemonProcess, fresh_sample: object) -> Iterator[None]:
    """What comes after this module finds the weights that the daemon was started with."""
    yield
    with daemon_process.connect() as connected:
        connected.reload()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights B, elsewhere than the model."""
    return build_model("qwen3", tmp_path / "b", seed=1)


@pytest.fixture
def own(model_path: Path, tmp_path: Path) -> Iterator[Path]:
    """The model's own directory; what a test does to its weights is undone."""
    shutil.copy(model_path / WEIGHTS, tmp_path / "kept")
    yield model_path
    shutil.copy(tmp_path / "kept", model_path / WEIGHTS)


def outcome(daemon: Daemon) -> tuple[list[int], list[float], str | None]:
    sample = daemon.generate_one(PROMPT, GREEDY)
    return sample.token_ids.tolist(), sample.logprobs.tolist(), daemon.digest("full").digest


def test_a_checkpoint_rewritten_in_place_is_served_exactly(
    daemon: Daemon, model: PreTrainedModel, own: Path, fresh_sample: tuple[list[int], list[float]]
) -> None:
    """Equal to an in-place refit of the same weights, and back again to what the daemon was started with."""
    load_seed(model, 1)
    daemon.refit(model)
    pushed = outcome(daemon)
    load_seed(model, 0)
    daemon.refit(model)
    before = outcome(daemon)
    save_file(load_file(build_model("qwen3", own.parent / "seed-1", seed=1) / WEIGHTS), own / WEIGHTS)
    report = daemon.reload()
    assert outcome(daemon) == pushed
    assert daemon.status().version == report.version
    assert report.path == "plan"
    build_model("qwen3", own.parent / "seed-0", seed=0)
    shutil.copy(own.parent / "seed-0" / WEIGHTS, own / WEIGHTS)
    daemon.reload()
    assert outcome(daemon) == before
    assert before[:2] == fresh_sample


def test_the_prefix_cache_is_not_stale_after_a_reload(daemon: Daemon, model: PreTrainedModel, checkpoint: Path) -> None:
    """A prompt that was cached under the old weights is read anew, also with a request running meanwhile."""
    daemon.refit(model)
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    daemon.generate_one(LONG_PROMPT, sampling)
    assert daemon.generate_one(LONG_PROMPT, sampling).cached_tokens
    running = daemon.stream([[1, 2, 3]], Sampling(max_tokens=200, ignore_eos=True))
    next(running)
    version = daemon.reload(checkpoint, policy="keep").version
    after = daemon.generate_one(LONG_PROMPT, sampling)
    assert (after.cached_tokens, after.version) == (0, version)
    assert sum(delta.token_ids.size for delta in running) > 0
    load_seed(model, 1)
    daemon.refit(model)
    cold = daemon.generate_one(LONG_PROMPT, sampling)
    assert (after.token_ids.tolist(), after.logprobs.tolist()) == (cold.token_ids.tolist(), cold.logprobs.tolist())


def test_other_float_dtypes_are_cast(daemon: Daemon, model: PreTrainedModel, checkpoint: Path, tmp_path: Path) -> None:
    """An fp32 checkpoint in two files equals its bf16 form."""
    tensors = load_file(checkpoint / WEIGHTS)
    names = sorted(tensors)
    shutil.copytree(checkpoint, tmp_path / "fp32", ignore=shutil.ignore_patterns("*.safetensors"))
    for part, chosen in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name].float() for name in chosen}, tmp_path / "fp32" / f"model-{part}.safetensors")
    load_seed(model, 1)
    digest = daemon.refit(model).digest
    load_seed(model, 0)
    daemon.refit(model)
    assert daemon.reload(tmp_path / "fp32").digest == digest


def _cut(directory: Path) -> None:
    file = directory / WEIGHTS
    file.write_bytes(file.read_bytes()[:-2])


def _garble(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes(b"no weights at all, for sure")


def _drop_a_norm(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, directory / WEIGHTS)


def _reshape(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    save_file(tensors, directory / WEIGHTS)


def _rename_architecture(directory: Path) -> None:
    config = directory / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "LlamaForCausalLM"))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (_cut, ErrorCode.INVALID_CHECKPOINT),
        (_garble, ErrorCode.INVALID_CHECKPOINT),
        (_rename_architecture, ErrorCode.INVALID_CHECKPOINT),
        (lambda directory: (directory / WEIGHTS).unlink(), ErrorCode.INVALID_CHECKPOINT),
        (shutil.rmtree, ErrorCode.INVALID_CHECKPOINT),
        (_drop_a_norm, ErrorCode.MANIFEST_MISMATCH),
        (_reshape, ErrorCode.MANIFEST_MISMATCH),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_changes(
    daemon: Daemon, checkpoint: Path, damage: Callable[[Path], object], code: ErrorCode
) -> None:
    """Short, broken, missing, incomplete, of another shape or architecture: the engine goes on as it was."""
    damage(checkpoint)
    with unharmed(daemon), pytest.raises(RefitdError) as refused:
        daemon.reload(checkpoint)
    assert refused.value.code is code
    assert daemon.status().state is EngineState.READY


def test_not_finite_checkpoints_are_refused_where_asked(daemon: Daemon, checkpoint: Path) -> None:
    """Before the first write, naming the tensor."""
    tensors = load_file(checkpoint / WEIGHTS)
    tensors["lm_head.weight"][3, 5] = float("inf")
    save_file(tensors, checkpoint / WEIGHTS)
    with unharmed(daemon), pytest.raises(RefitdError) as refused:
        daemon.reload(checkpoint, check_finite=True)
    assert refused.value.code is ErrorCode.NOT_FINITE
    assert "lm_head.weight" in str(refused.value)


def test_a_reload_obeys_the_rules_of_every_refit(
    daemon: Daemon, daemon_process: DaemonProcess, checkpoint: Path
) -> None:
    """Only the writer, only a rising version."""
    daemon.acquire_writer()
    with unharmed(daemon), daemon_process.connect() as other:
        with pytest.raises(RefitdError) as busy:
            other.reload(checkpoint)
        with pytest.raises(RefitdError) as old:
            daemon.reload(checkpoint, version=daemon.status().version)
    assert busy.value.code is ErrorCode.WRITER_BUSY
    assert old.value.code is ErrorCode.VERSION_NOT_INCREASING
    assert daemon.reload(checkpoint, version=daemon.status().version + 5).version == daemon.status().version


def test_a_reload_fills_what_level_2_sleep_has_dropped(daemon: Daemon, checkpoint: Path) -> None:
    """No trainer is needed to serve again."""
    daemon.sleep(2)
    assert not daemon.wake_up().servable
    daemon.reload(checkpoint)
    assert daemon.status().state is EngineState.READY
    assert daemon.verify(random_model("qwen3", seed=1), full=True)


def test_the_command_line_reloads(daemon: Daemon, daemon_process: DaemonProcess, checkpoint: Path) -> None:
    """`refitd reload PATH` says the version; a refusal is one line and exit code 1."""
    daemon.release_writer()
    done = CliRunner().invoke(app, ["reload", str(checkpoint), "--endpoint", daemon_process.endpoint])
    assert done.exit_code == 0, done.output
    assert f"version {daemon.status().version} is served" in done.output
    assert daemon.verify(random_model("qwen3", seed=1))
    refused = CliRunner().invoke(app, ["reload", str(checkpoint / "nowhere"), "--endpoint", daemon_process.endpoint])
    assert refused.exit_code == 1
    assert "invalid_checkpoint" in refused.output


def test_a_version_that_cannot_be_is_a_mistake_on_the_command_line(tmp_path: Path) -> None:
    """As any other: nobody is asked, and nothing is traced back."""
    refused = CliRunner().invoke(app, ["reload", "--version", "-1", "--endpoint", f"ipc://{tmp_path}/s"])
    assert refused.exit_code == 2
    assert "--version" in refused.output
