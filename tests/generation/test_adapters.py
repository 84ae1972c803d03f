"""LoRA adapters: a request that names one gets its tokens, everybody else's are as without; refits stay exact."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import torch
from transformers import PreTrainedModel

from refit_protocol.errors import ErrorCode
from refit_trainer import Daemon, RefitdError, Sample, Sampling
from tests.canary import unharmed
from tests.conftest import PROMPT, load_seed
from tests.daemon_process import DaemonProcess, running_daemon
from tests.generation.conftest import CLOSE, Reference
from tests.generation.lora import Weights, adapter_weights, merged, write_adapter
from tests.worker.models import random_model

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG_PROMPT = [index * 7 % 500 for index in range(150)]


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return random_model("qwen3", seed=0)


@pytest.fixture(scope="module")
def one(base: PreTrainedModel) -> Weights:
    return adapter_weights(base, seed=3)


@pytest.fixture(scope="module")
def adapters(base: PreTrainedModel, one: Weights, short_directory: Path) -> Path:
    write_adapter(short_directory / "adapters" / "one", one)
    write_adapter(short_directory / "adapters" / "two", adapter_weights(base, seed=4))
    return short_directory / "adapters"


@pytest.fixture(scope="module")
def with_lora(model_path: Path, adapters: Path, short_directory: Path) -> Iterator[DaemonProcess]:
    """A daemon of this module's own, with room for two adapters, one of them loaded; it leaves no copies behind."""
    with running_daemon(
        model_path,
        short_directory / "lora",
        "lora.enabled=true",
        "lora.max_adapters=2",
        "lora.max_rank=8",
        f'lora.adapters={{one = "{adapters}/one"}}',
        "http.enabled=true",
    ) as process:
        yield process
    assert not (short_directory / "lora" / "adapters").exists()


@pytest.fixture
def daemon(with_lora: DaemonProcess, adapters: Path) -> Iterator[Daemon]:
    """Both adapters are loaded, and the model's own weights served."""
    with with_lora.connect() as connected:
        connected.load_adapter("two", adapters / "two")
        yield connected
        connected.reload()


def sample(daemon: Daemon, lora: str | None, prompt: list[int] = PROMPT) -> Sample:
    return daemon.generate_one(prompt, GREEDY, lora=lora)


def ids(daemon: Daemon, lora: str | None, prompt: list[int] = PROMPT) -> list[int]:
    return sample(daemon, lora, prompt).token_ids.tolist()


def test_an_adapter_has_the_effect_of_its_weights(daemon: Daemon, base: PreTrainedModel, one: Weights) -> None:
    """Logprobs are those of transformers with the adapter merged in, and not those of the base model."""
    made = sample(daemon, "one")
    for model, close in ((merged(base, one), True), (base, False)):
        expected = torch.log_softmax(Reference(model).next_logits(made), -1)
        taken = expected.gather(1, torch.tensor(made.token_ids.tolist())[:, None])[:, 0]
        assert (made.logprobs == pytest.approx(taken.numpy(), abs=CLOSE)) is close


def test_requests_of_one_batch_do_not_touch_each_other(daemon: Daemon) -> None:
    """Base model and both adapters, running together, give what each gives alone."""
    names = [None, "one", "two", None, "two", "one"]
    alone = {name: ids(daemon, name) for name in (None, "one", "two")}
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    running = [daemon.generate([PROMPT], GREEDY, lora=name) for name in names]
    assert [next(samples).token_ids.tolist() for samples in running] == [alone[name] for name in names]


def test_the_name_is_echoed_and_listed(daemon: Daemon) -> None:
    """In the resolved sampling, in the status."""
    with daemon.stream([PROMPT], GREEDY, lora="two") as stream:
        next(stream)
        assert stream.resolved is not None
        assert stream.resolved.lora == "two"
    assert daemon.status().adapters == ["one", "two"]


def test_no_adapter_finds_kv_of_another(daemon: Daemon, base: PreTrainedModel, tmp_path: Path) -> None:
    """Nor one that has replaced another under its name; its own it does find."""
    assert ids(daemon, "two", LONG_PROMPT) == ids(daemon, "two", LONG_PROMPT)
    assert sample(daemon, "two", LONG_PROMPT).cached_tokens
    daemon.load_adapter("two", write_adapter(tmp_path / "other", adapter_weights(base, seed=9)))
    daemon.reset_prefix_cache()
    expected = ids(daemon, "two", LONG_PROMPT)
    before = [sample(daemon, name, LONG_PROMPT) for name in ("one", None)]
    assert [each.cached_tokens for each in before] == [0, 0]
    daemon.load_adapter("two", tmp_path / "other")
    after = sample(daemon, "two", LONG_PROMPT)
    assert (after.cached_tokens, after.token_ids.tolist()) == (0, expected)


def test_refits_are_exact_with_adapters_and_leave_them(daemon: Daemon, model: PreTrainedModel, adapters: Path) -> None:
    """All by plan; A, B, A gives everybody the tokens of before, also where the adapter's files are gone since."""
    shutil.copytree(adapters / "two", adapters.parent / "gone")
    daemon.load_adapter("two", adapters.parent / "gone")
    shutil.rmtree(adapters.parent / "gone")
    before = {name: ids(daemon, name) for name in (None, "one", "two")}
    for seed in (1, 0):
        load_seed(model, seed)
        report = daemon.refit(model, attest="full")
        assert (report.path, report.unplanned) == ("plan", [])
        assert daemon.verify(model, full=True)
        assert ({name: ids(daemon, name) for name in before} == before) is (seed == 0)


def test_a_request_goes_on_with_the_adapter_it_began_with(daemon: Daemon, adapters: Path) -> None:
    """Unloaded and replaced meanwhile; new requests are refused by name until there is one again."""
    long = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
    expected = daemon.generate_one(PROMPT, long, lora="two").token_ids.tolist()
    running = daemon.generate([PROMPT], long, lora="two")
    daemon.unload_adapter("two")
    with pytest.raises(RefitdError) as unknown:
        ids(daemon, "two")
    assert unknown.value.code is ErrorCode.UNKNOWN_ADAPTER
    assert "one" in str(unknown.value)
    daemon.load_adapter("two", adapters / "one")
    assert next(running).token_ids.tolist() == expected
    assert ids(daemon, "two") == ids(daemon, "one")


def test_adapters_are_limited_and_names_kept_apart(daemon: Daemon, adapters: Path) -> None:
    """By `lora.max_adapters`; the model's own name is none for an adapter."""
    with pytest.raises(RefitdError) as full:
        daemon.load_adapter("three", adapters / "one")
    assert full.value.code is ErrorCode.LIMIT_EXCEEDED
    own = daemon.status().model.name
    for name in ("", "a\nb", "x" * 201, own):
        with pytest.raises(RefitdError) as refused:
            daemon.load_adapter(name, adapters / "one")
        assert refused.value.code is ErrorCode.INVALID_ADAPTER


def _renamed(weights: Weights) -> Weights:
    return {name.replace("layers.1.", "layers.7."): tensor for name, tensor in weights.items()}


def _halved(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if "lora_A" not in name}


def _narrowed(weights: Weights) -> Weights:
    return {name: tensor[:, :3] for name, tensor in weights.items()}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path, _: (path / "adapter_config.json").unlink(),
        lambda path, _: (path / "adapter_model.safetensors").unlink(),
        lambda path, _: (path / "adapter_config.json").write_text("{"),
        lambda path, _: (path / "adapter_model.safetensors").write_bytes(b"no weights"),
        lambda path, weights: write_adapter(path, weights, rank=16),
        lambda path, weights: write_adapter(path, _renamed(weights)),
        lambda path, weights: write_adapter(path, _narrowed(weights)),
        lambda path, weights: write_adapter(path, _halved(weights)),
        lambda path, _: write_adapter(path, {"base_model.model.x.lora_A.weight": torch.ones(4, 4)}),
        lambda path, weights: write_adapter(path, {name: tensor / 0 for name, tensor in weights.items()}),
    ],
)
def test_what_is_no_adapter_of_this_model_is_refused(
    daemon: Daemon, one: Weights, tmp_path: Path, spoil: Callable[[Path, Weights], object]
) -> None:
    """Missing, broken, of too high a rank, of other shapes, for modules that are not there, not finite; all goes on as
    before."""
    path = write_adapter(tmp_path / "spoilt", one)
    spoil(path, one)
    two = ids(daemon, "two")
    with unharmed(daemon), pytest.raises(RefitdError) as refused:
        daemon.load_adapter("two", path)
    assert refused.value.code is ErrorCode.INVALID_ADAPTER
    assert ids(daemon, "two") == two


def test_an_adapter_that_makes_nan_harms_nobody_else(daemon: Daemon, one: Weights, tmp_path: Path) -> None:
    """Its requests fail. What they leave in the KV cache is taken out before others get the blocks: of these, two in
    five had failed too, until the next refit."""
    daemon.load_adapter("two", write_adapter(tmp_path / "huge", {name: tensor * 1e30 for name, tensor in one.items()}))
    prompts = [PROMPT * (1 + number % 17) for number in range(60)]
    for _ in range(3):
        broken = daemon.generate(prompts, GREEDY, lora="two", incomplete="yield")
        assert {each.error for each in broken} == {ErrorCode.NOT_A_NUMBER}
        assert {each.error for each in daemon.generate(prompts, GREEDY)} == {None}


def test_adapters_are_models_of_the_openai_endpoint(daemon: Daemon, adapters: Path) -> None:
    """Listed, and served by name with the same tokens; what has been unloaded is gone there too."""
    status = daemon.status()
    with openai.OpenAI(base_url=status.http_url, api_key="none", max_retries=0) as client:
        assert {model.id for model in client.models.list().data} == {status.model.name, "one", "two"}
        for name, lora in ((status.model.name, None), ("one", "one"), ("two", "two")):
            answer = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.choices[0].token_ids == ids(daemon, lora)
        daemon.unload_adapter("two")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="two", prompt=PROMPT, max_tokens=1)
        daemon.load_adapter("two", adapters / "two")
        assert {model.id for model in client.models.list().data} >= {"two"}
